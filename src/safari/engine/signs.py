"""Quantisation that turns no dense number negative: `safari.wire.signs` on the models' device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from safari.wire import WireLayout


@dataclass(frozen=True, eq=False)
class Signs:
    """The dense columns, what the reference holds there (`float64[columns]`), and which numbers of each
    client are not negative there (`bool[clients, columns]`)."""

    columns: Tensor
    base: Tensor
    held: Tensor

    @classmethod
    def read(cls, models: Tensor, x: Tensor, layout: WireLayout) -> Signs:
        """Read the dense columns and the signs in them of the models to quantise."""
        prunable = torch.tensor(layout.prunable, device=x.device)
        sizes = torch.tensor(layout.sizes, device=x.device)
        columns = (~torch.repeat_interleave(prunable, sizes)).nonzero()[:, 0]
        return cls(columns, x[columns].double(), models[:, columns] >= 0)

    def of(self, clients: Tensor) -> Signs:
        """Select the rows of some clients."""
        return Signs(self.columns, self.base, self.held[clients])

    def keep_multiples(self, whole: Tensor, scales: Tensor) -> Tensor:
        """Multiples of scales (`float64[clients, 1 or d]`), one more where a number would lose its sign."""
        here, part = scales if scales.shape[1] == 1 else scales[:, self.columns], whole[:, self.columns]
        return whole.index_copy(1, self.columns, part + self._sign_lost(part * here))

    def keep_halves(self, halves: Tensor) -> Tensor:
        """Numbers of 16 bits, the next above where a number would lose its sign."""
        part = halves[:, self.columns]
        bits = part.view(torch.int16)
        above = (bits + torch.where(bits < 0, -1, 1).to(torch.int16)).view(halves.dtype)
        lost = self._sign_lost(part.double()) & above.isfinite()
        return halves.index_copy(1, self.columns, torch.where(lost, above, part))

    def _sign_lost(self, change: Tensor) -> Tensor:
        return self.held & (self.base + change < 0)
