"""Coordinates that each packet of a model covers, estimated without encoding every model.

How many bytes a coordinate takes hardly differs from one client to the next: a part for each, which says
whether it is kept, and a part for each that is. Both are measured on one upload that is really encoded, now
and then; the packets of the others follow from their masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from safari.errors import SafariError
from safari.wire import Lossy
from safari.wire.identity import Identity
from safari.wire.layout import Bools, Floats, Ints, WireLayout
from safari.wire.packet import covered_range, packets
from safari.wire.shared import Shared


@dataclass(frozen=True)
class Packetisation:
    """Estimate of how a model is cut into packets: packets for each coordinate, and bytes of a packet.

    Args:
        layout: The model's layout on the wire.
        prunable: Packets for each coordinate that may be cut, kept or not.
        kept: Packets for each prunable coordinate that is kept, beyond that.
        dense: Packets for each coordinate that is never cut.
        packet: Bytes of a packet, on average.
    """

    layout: WireLayout
    prunable: float
    kept: float
    dense: float
    packet: float

    @classmethod
    def measure(
        cls,
        vector: Floats,
        mask: Bools,
        shared: Shared,
        *,
        limit: int,
        values: str = "auto",
        lossy: Lossy | None = None,
        identity: Identity | None = None,
    ) -> Packetisation:
        """From one upload, encoded; the arguments are those of `safari.wire.packets`."""
        layout = shared.layout
        found = packets(vector, mask, shared, limit=limit, values=values, lossy=lossy, identity=identity)
        kept = layout.to_wire(mask)
        rows, shares = [], []
        for data in found[:-1] or found:
            first, span = covered_range(data, layout)
            cut = min(max(layout.prunable_total - first, 0), span)
            rows.append((cut, int(kept[first : first + cut].sum()), span - cut))
            shares.append(1.0 if len(found) > 1 else len(data) / limit)
        prunable, each, dense = _non_negative(np.array(rows, np.float64), np.array(shares)).tolist()
        # Often only the last packet has any that are never cut.
        dense = dense or each or prunable
        return cls(layout, prunable, each, dense, packet=float(np.mean([len(data) for data in found])))

    def edges(self, mask: Bools) -> Ints:
        """First wire coordinate of each packet of a model with this mask, followed by `d`."""
        if mask.shape != (self.layout.d,):
            raise SafariError(f"mask must be bool[{self.layout.d}], got {mask.dtype}{list(mask.shape)}")
        costs = np.full(self.layout.d, self.dense)
        total = self.layout.prunable_total
        costs[:total] = self.prunable + self.kept * self.layout.to_wire(mask)[:total]
        so_far = np.cumsum(costs)
        count = max(1, int(np.ceil(so_far[-1] - 1e-9))) if self.layout.d else 1
        inner = np.searchsorted(so_far, np.arange(1, count), side="right")
        return np.unique(np.concatenate([[0], inner, [self.layout.d]])).astype(np.int64)


def coverage(layout: WireLayout, edges: Ints, delivered: Sequence[bool] | Bools) -> Bools:
    """True where a coordinate of the flat vector is in a packet that was delivered.

    >>> layout = WireLayout(["w", "bias", "v"], [4, 2, 2], [True, False, True])
    >>> coverage(layout, np.array([0, 5, 7, 8]), [True, False, True]).astype(int).tolist()
    [1, 1, 1, 1, 0, 1, 1, 0]
    """
    flags = np.asarray(delivered, np.bool_)
    if len(flags) != len(edges) - 1:
        raise SafariError(f"delivered must say it of the {len(edges) - 1} packets, got {len(flags)}")
    return layout.from_wire(np.repeat(flags, np.diff(edges)))


def range_coverage(layout: WireLayout, ranges: Sequence[tuple[int, int]]) -> Bools:
    """True where a coordinate of the flat vector lies in one of these ranges (first, count) in wire order.

    >>> layout = WireLayout(["w", "bias", "v"], [4, 2, 2], [True, False, True])
    >>> range_coverage(layout, [(0, 5), (7, 1)]).astype(int).tolist()
    [1, 1, 1, 1, 0, 1, 1, 0]
    """
    flags = np.zeros(layout.d, np.bool_)
    for first, count in ranges:
        if not 0 <= first < first + count <= layout.d:
            raise SafariError(
                f"ranges must lie within the model's {layout.d} numbers, got [{first}, {count}]"
            )
        flags[first : first + count] = True
    return layout.from_wire(flags)


def _non_negative(rows: npt.NDArray[np.float64], shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Least squares of shares = rows · costs with costs of at least 0; every subset of columns is tried."""
    best, least = np.full(3, 1.0 / max(1.0, rows.sum())), np.inf
    for used in range(1, 8):
        columns = [i for i in range(3) if used >> i & 1 and rows[:, i].any()]
        if not columns:
            continue
        costs = np.zeros(3)
        costs[columns] = np.linalg.lstsq(rows[:, columns], shares, rcond=None)[0]
        error = float(np.square(rows @ costs - shares).sum())
        if (costs >= 0).all() and error < least - 1e-12:
            best, least = costs, error
    return best
