"""A few of many places, perhaps with a number each: the top-k of a gradient, votes for weights to grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from safari.errors import SafariError
from safari.wire.frame import decode, encode
from safari.wire.identity import Identity
from safari.wire.layout import Floats, Ints, WireLayout
from safari.wire.masks import decode_mask, encode_mask
from safari.wire.rounding import Lossy


@dataclass(frozen=True, eq=False)
class Votes:
    """Ascending places, and the numbers at them where there are any."""

    indices: Ints
    values: Floats | None


def encode_votes(
    indices: Ints,
    values: Floats | None,
    size: int,
    *,
    segments: Sequence[int] | None = None,
    mode: str = "bf16",
    lossy: Lossy | None = None,
    identity: Identity | None = None,
) -> bytes:
    """Distinct places out of `size`, in the bytes of their gaps, and a number for each.

    Votes about weights that are cut are shortest when they count the cut ones only:
    `np.searchsorted(np.flatnonzero(~mask), places)` of `(~mask).sum()`.

    Args:
        indices: Whole numbers from 0 and below `size`, all different, in any order.
        values: `float32`, one for each of `indices`; None: the places say everything.
        size: How many places there are.
        segments: Sizes of neighbouring groups of places that are chosen unlike often, such as layers; they
            add up to `size`. None: one group.
        mode: How the numbers travel: a value mode of `encode`.
        lossy: Options of that mode.
        identity: As for `encode`.

    >>> data = encode_votes(np.array([7, 100, 3]), None, 1000)
    >>> len(data), decode_votes(data, 1000).indices.tolist()
    (24, [3, 7, 100])
    """
    layout = _layout(size, segments)
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise SafariError(f"indices must be a row of whole numbers, got {indices.dtype}{list(indices.shape)}")
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        raise SafariError(
            f"indices must be 0 to {size - 1}, got {int(indices.min())} to {int(indices.max())}"
        )
    mask = np.zeros(size, np.bool_)
    mask[indices] = True
    if np.count_nonzero(mask) != indices.size:
        raise SafariError(f"indices must differ, got {indices.size - np.count_nonzero(mask)} twice")
    if values is None:
        return encode_mask(mask, layout, identity=identity)
    if values.shape != indices.shape or values.dtype != np.float32:
        raise SafariError(f"values must be float32[{indices.size}], got {values.dtype}{list(values.shape)}")
    vector = np.zeros(size, np.float32)
    vector[indices] = values
    return encode(vector, mask, layout, values=mode, lossy=lossy, identity=identity)


def decode_votes(
    data: bytes,
    size: int,
    *,
    with_values: bool = False,
    segments: Sequence[int] | None = None,
    expect: Identity | None = None,
) -> Votes:
    """Decode the message of `encode_votes` for the same `size` and `segments`; raises as `decode` does.

    `with_values` says whether there are numbers: a message of the other kind is refused.
    """
    layout = _layout(size, segments)
    if not with_values:
        return Votes(np.flatnonzero(decode_mask(data, layout, expect=expect)), None)
    found = decode(data, layout, expect=expect)
    indices = np.flatnonzero(found.mask)
    return Votes(indices, found.vector[indices])


def _layout(size: int, segments: Sequence[int] | None) -> WireLayout:
    sizes = [size] if segments is None else list(segments)
    if sum(sizes) != size:
        raise SafariError(f"segments must add up to size {size}, got {sum(sizes)}")
    return WireLayout(["votes"] * len(sizes), sizes, [True] * len(sizes))
