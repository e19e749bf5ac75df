"""Many clients' models in one buffer, tensor by tensor: each tensor of all clients lies together.

A client's model travels through the package as a row of `[clients, size]`. The kernels want the other order: for
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
        """Number of parameters in the buffer; they come first."""
        return self.clients * self.layout.parameters

    def from_rows(self, rows: Tensor) -> Tensor:
        """A new buffer that holds the given models (or masks), one a row.

        >>> layout = Layout.of(torch.nn.Linear(1, 2))
        >>> Flat(layout, 2).from_rows(torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]))
        tensor([1., 2., 5., 6., 3., 4., 7., 8.])
        """
        return self._filled(rows, self.layout.size)

    def places(self, masks: Tensor) -> Tensor:
        """Indices in the buffer of the parameters that clients keep; `masks`: a row each, or one for all.

        >>> layout = Layout.of(torch.nn.Linear(1, 2))
        >>> Flat(layout, 2).places(torch.tensor([[False, True, True, False]]))
        tensor([1, 4, 3, 6])
        """
        if len(masks) > 1 or self.clients == 1:
            return self.from_rows(masks)[: self.parameters].nonzero().squeeze(1)
        # One client's places are soon found; another's lie a tensor's size further on.
        place = masks[0, : self.layout.parameters].nonzero().squeeze(1)
        sizes, offsets = (table.to(place.device)[place] for table in self.layout.homes)
        first = place + (self.clients - 1) * offsets
        return (first + torch.arange(self.clients, device=place.device).unsqueeze(1) * sizes).flatten()

    def to_rows(self, buffer: Tensor) -> Tensor:
        """The models as rows again: the inverse of `from_rows`."""
        if self.clients == 1:
            return buffer.unsqueeze(0)
        parts = [self._part(buffer, e.offset, e.end) for e in self.layout.entries]
        return torch.cat(parts, dim=1)

    def parameter_rows(self, buffer: Tensor) -> Tensor:
        """The parameters in a buffer that holds nothing else, a row a client."""
        if self.clients == 1:
            return buffer.unsqueeze(0)
        held = [e for e in self.layout.entries if e.kind != "buffer"]
        return torch.cat([self._part(buffer, e.offset, e.end) for e in held], dim=1)

    def from_parameter_rows(self, rows: Tensor) -> Tensor:
        """The inverse: a new buffer of parameters alone."""
        return self._filled(rows, self.layout.parameters)

    def _filled(self, rows: Tensor, size: int) -> Tensor:
        """A new buffer of the tensors that make up the first `size` numbers of a model."""
        buffer = rows.new_empty(self.clients * size)
        if self.clients == 1:
            return buffer.copy_(rows[0])
        for e in self.layout.entries:
            if e.end <= size:
                self._part(buffer, e.offset, e.end).copy_(rows[:, e.offset : e.end])
        return buffer

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
