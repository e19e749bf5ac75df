"""Size of one model in every mode, next to plain formats and the entropy of what must be said."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from safari.modes import ValueMode
from safari.wire.bits import binary_bits, order0_bits
from safari.wire.frame import decode, encode
from safari.wire.layout import Bools, Floats, WireLayout
from safari.wire.packet import packets
from safari.wire.rounding import Lossy
from safari.wire.shared import Shared, as_shared


@dataclass(frozen=True)
class Cost:
    """A way to write a model, in bytes; `error` is relative to the change, 0 where every bit comes back."""

    name: str
    size: int
    error: float = 0.0
    packets: int | None = None
    packet_bytes: int | None = None


@dataclass(frozen=True)
class Bounds:
    """The usual floor (entropy of the mask, raw float32), and the same with the exponents' entropy."""

    floor: float
    order0: float


def bounds(vector: Floats, mask: Bools, layout: WireLayout) -> Bounds:
    """Both bounds in bytes; the entropy of the mask is taken entry by entry.

    >>> layout = WireLayout(["w"], [8], [True])
    >>> bounds(np.array([1, 0, 1, 0, 2, 0, 2, 0], np.float32), np.arange(8) % 2 == 0, layout)
    Bounds(floor=17.0, order0=13.5)
    """
    edges = np.concatenate([[0], np.cumsum(layout.sizes)]).astype(np.int64)
    bits = sum(
        binary_bits(int(mask[a:b].sum()), int(b - a))
        for a, b, flag in zip(edges[:-1], edges[1:], layout.prunable, strict=True)
        if flag
    )
    kept = vector[mask].view(np.uint32)
    exponents = order0_bits(np.bincount((kept >> 23) & 255))
    return Bounds(bits / 8 + 4 * kept.size, (bits + exponents) / 8 + 3 * kept.size)


def plain_costs(vector: Floats, mask: Bools, layout: WireLayout) -> list[Cost]:
    """Formats that need no library."""
    dense, kept = vector.astype("<f4").tobytes(), int(mask.sum())
    return [
        Cost("dense float32", len(dense)),
        Cost("int32 index + float32", 8 * kept),
        Cost("bit mask + float32", (layout.prunable_total + 7) // 8 + 4 * kept),
        Cost("zlib 1 of dense", len(zlib.compress(dense, 1))),
        Cost("zlib 9 of dense", len(zlib.compress(dense, 9))),
    ]


def costs(
    vector: Floats,
    mask: Bools,
    layout: WireLayout | Shared,
    *,
    reference: Floats | None = None,
    predicted_mask: Bools | None = None,
    lossy: Lossy | None = None,
) -> list[Cost]:
    """Every mode that the shared knowledge allows, as a frame and as packets.

    The lossy modes are shown with the best mask mode; qsgd needs `lossy.rng`.
    """
    shared = as_shared(layout, reference, predicted_mask)
    lossy = lossy or Lossy()
    only_layout = Shared(shared.layout)
    cases = [("absolute", "coded", only_layout)]
    if shared.reference is not None:
        cases.append(("difference", "coded", Shared(shared.layout, shared.reference)))
    if shared.mask_bits is not None:
        cases += [(values, "auto", shared) for values in ("absolute", "difference")[: 1 + (len(cases) > 1)]]
    for values in ValueMode:
        if not values.exact and (not values.random or lossy.rng is not None):
            cases.append((values, "auto", shared))
    return [_cost(vector, mask, *case, lossy) for case in cases]


def _cost(vector: Floats, mask: Bools, values: str, mask_mode: str, shared: Shared, lossy: Lossy) -> Cost:
    frame = encode(vector, mask, shared, values=values, mask_mode=mask_mode, lossy=lossy)
    found = decode(frame, shared)
    base = vector if shared.reference is None else vector - shared.reference
    scale = float(np.linalg.norm(base[mask].astype(np.float64)))
    missing = float(np.linalg.norm((found.vector[mask] - vector[mask]).astype(np.float64)))
    if np.array_equal(found.vector.view(np.uint32)[mask], vector.view(np.uint32)[mask]):
        missing = 0.0
    datagrams = packets(vector, mask, shared, values=values, mask_mode=mask_mode, lossy=lossy)
    name = f"{values}, mask {found.info.modes.mask}"
    error = missing / scale if scale else missing
    return Cost(name, len(frame), error, len(datagrams), sum(map(len, datagrams)))
