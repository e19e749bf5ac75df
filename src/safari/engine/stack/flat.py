"""Many clients' models in one buffer, tensor by tensor: each tensor of all clients lies together.

A client's model crosses the house as a row of `[clients, size]`. The kernels want the other order: for
each tensor of the layout a contiguous `[clients, *shape]`. So entry e of the layout begins at
`clients · e.offset` of the buffer, and parameters still come first, buffers last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from safari.models import Layout


@dataclass(frozen=True)
class Flat:
    """The order of `clients` models of one layout in a buffer."""

    layout: Layout
    clients: int

    @property
    def parameters(self) -> int:
        """How many numbers of the buffer, from the front, are parameters."""
        return self.clients * self.layout.parameters

    def spread(self, vector: Tensor) -> Tensor:
        """The buffer in which every client has the same model (or mask).

        >>> layout = Layout.of(torch.nn.Linear(1, 2))
        >>> Flat(layout, 2).spread(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([1., 2., 1., 2., 3., 4., 3., 4.])
        """
        return torch.cat([vector[e.offset : e.end].repeat(self.clients) for e in self.layout.entries])

    def from_rows(self, rows: Tensor) -> Tensor:
        """The buffer that holds the given models, one a row."""
        return torch.cat([rows[:, e.offset : e.end].reshape(-1) for e in self.layout.entries])

    def to_rows(self, buffer: Tensor) -> Tensor:
        """The models as rows again: the inverse of `from_rows`."""
        parts = [self._part(buffer, e.offset, e.end) for e in self.layout.entries]
        return torch.cat(parts, dim=1)

    def views(self, parameters: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        """`[clients, *shape]` for each tensor, without a copy.

        The two parts of the buffer are apart here because training writes to one while the other's
        gradients are under way.
        """
        found = {}
        for e in self.layout.entries:
            part, start = (buffers, e.offset - self.layout.parameters)
            if e.kind != "buffer":
                part, start = parameters, e.offset
            found[e.name] = self._part(part, start, start + e.size).view(self.clients, *e.shape)
        return found

    def _part(self, buffer: Tensor, start: int, end: int) -> Tensor:
        return buffer[self.clients * start : self.clients * end].view(self.clients, end - start)
