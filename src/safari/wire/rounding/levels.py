"""Evenly spaced levels: int8, QSGD (Alistarh et al. 2017), and how many of them to take (AdaQuantFL).

An entry with the largest magnitude `a` and `s` levels has the scale `c`, which is `a / s` as the next
bfloat16 from there on. A number `v` travels as a whole multiple of it:

    int8   round(v / c),      s = 127
    QSGD   floor(v / c + u),  u uniform in [0, 1):  right on average
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from safari.errors import SafariError
from safari.wire.kept import Quantised
from safari.wire.layout import Ints
from safari.wire.scales import Wide, by_entry

if TYPE_CHECKING:
    from safari.wire.rounding import Lossy

INT8_LEVELS = 127


def int8(target: Wide, counts: Ints) -> Quantised:
    """Rounded to the nearest of 127 levels on each side of 0."""
    scales, exact = _in_scales(target, counts, INT8_LEVELS)
    return Quantised(scales, np.rint(exact).astype(np.int32).clip(-INT8_LEVELS, INT8_LEVELS))


def qsgd(target: Wide, counts: Ints, lossy: Lossy) -> Quantised:
    """Rounded up or down at random, without bias."""
    if lossy.rng is None:
        raise SafariError("qsgd mode needs rng, the generator that rounds")
    levels = levels_of(lossy)
    scales, exact = _in_scales(target, counts, levels)
    whole = np.floor(exact + lossy.rng.random(exact.size))
    return Quantised(scales, whole.astype(np.int32).clip(-levels, levels))


def qsgd_levels(bits: int) -> int:
    """The largest multiple that a number of this many bits can be."""
    return (1 << (bits - 1)) - 1


def levels_of(lossy: Lossy) -> int:
    """Number of QSGD levels on each side of 0: `levels` where set, otherwise those of `bits`."""
    return qsgd_levels(lossy.bits) if lossy.levels is None else lossy.levels


def _in_scales(target: Wide, counts: Ints, levels: int) -> tuple[np.ndarray, Wide]:
    scales = by_entry(target, counts, levels)
    # A scale is 0 only where all its numbers are.
    return scales, target / np.repeat(np.where(scales > 0, scales, 1).astype(np.float64), counts)


def adaquant_levels(first_loss: float, loss: float, first_levels: int, most: int = 127) -> int:
    """Number of QSGD levels for a training loss (AdaQuantFL, Jhunjhunwala et al. 2021).

        s_k = round(s_0 · sqrt(F(w_0) / F(w_k))),  from 1 to `most`

    Few levels at the beginning, when the loss falls whatever the error, and more as it nears its end. In a run
    `wire.adapt = "loss"` does this; elsewhere it is `Lossy(levels=adaquant_levels(...))` with the mode qsgd.

    Args:
        first_loss: The training loss of the first model, above 0.
        loss: The training loss of the present one, above 0.
        first_levels: Levels of the first round, at least 1.
        most: Never more than that.

    >>> [adaquant_levels(2.3, loss, 2) for loss in (2.3, 1.0, 0.1, 1e-9)]
    [2, 3, 10, 127]
    """
    for field, number in (("first_loss", first_loss), ("loss", loss)):
        if not (number > 0 and np.isfinite(number)):
            raise SafariError(f"{field} must be positive and finite, got {number}")
    if not 1 <= first_levels <= most:
        raise SafariError(f"first_levels must be 1 to {most}, got {first_levels}")
    return int(min(max(round(first_levels * (first_loss / loss) ** 0.5), 1), most))
