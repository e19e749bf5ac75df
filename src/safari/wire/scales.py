"""Scales: what one whole number of the integer modes is worth. They travel as bfloat16."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from safari.errors import SafariError
from safari.wire.layout import Floats, Ints

# A scale travels as a bfloat16; numbers are rounded to multiples of what travels.
SCALE_BYTES = 2
MOST_STEPS = 1 << 30
# The largest bfloat16 that is a number.
LARGEST = (2 - 2**-7) * 2.0**127

Wide = npt.NDArray[np.float64]


def to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """The nearest bfloat16, ties to even; a NaN stays one.

    >>> [hex(x) for x in to_bf16(np.array([1.0, 1.00390625, 3e38], np.float32))]
    ['0x3f80', '0x3f80', '0x7f62']
    """
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bf16(halves: npt.NDArray[np.uint16]) -> Floats:
    """The float32 of a bfloat16."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def near_bf16(number: float | np.floating) -> Floats:
    """The nearest finite bfloat16 of a number from 0 on, as an array of one float32.

    >>> near_bf16(1.001).tolist(), near_bf16(1e300).tolist() == [LARGEST]
    ([1.0], True)
    """
    return from_bf16(to_bf16(np.array([min(number, LARGEST)], np.float32)))


def upward(numbers: Wide) -> Floats:
    """The smallest bfloat16 that is at least the number, for numbers from 0 on.

    >>> upward(np.array([1.0, 1.001]))
    array([1.       , 1.0078125], dtype=float32)
    """
    with np.errstate(over="ignore"):
        near = numbers.astype(np.float32)
    above = np.where(near < numbers, np.nextafter(near, np.float32(np.inf)), near)
    bits = above.view(np.uint32).astype(np.uint64)
    scales = ((bits + 0xFFFF) >> 16 << 16).astype(np.uint32).view(np.float32)
    if not np.isfinite(scales).all():
        raise SafariError(f"values must be below {float(np.finfo(np.float32).max):.3g}")
    return scales


def by_entry(target: Wide, counts: Ints, levels: int) -> Floats:
    """For each entry the largest magnitude over `levels`, so that no number is beyond the last level."""
    largest = np.zeros(counts.size)
    used = counts > 0
    if used.any():
        starts = (np.cumsum(counts) - counts)[used]
        largest[used] = np.maximum.reduceat(np.abs(target), starts)
    return upward(largest / levels)


def quantum(target: Wide, steering: int, step: float) -> Floats:
    """`step` times the root mean square over the first `steering` numbers (over all, if that is none), as a
    bfloat16; more where a number would otherwise be too many steps."""
    if not target.size:
        return np.zeros(1, np.float32)
    leading = target[:steering] if steering else target
    wanted = step * np.sqrt(np.mean(leading**2))
    return np.maximum(near_bf16(wanted), least_quantum(target))


def least_quantum(target: Wide) -> Floats:
    """The smallest scale with which no number is more than `MOST_STEPS` of them."""
    return upward(np.abs(target).max(keepdims=True) / MOST_STEPS)


def multiples(target: Wide, scale: Floats) -> npt.NDArray[np.int32]:
    """The nearest multiples of one scale; all 0 where it is."""
    wide = float(scale[0]) if scale.size else 0.0
    exact = target / wide if wide else np.zeros_like(target)
    return np.clip(np.rint(exact), -MOST_STEPS, MOST_STEPS).astype(np.int32)
