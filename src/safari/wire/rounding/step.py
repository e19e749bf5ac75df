"""Whole steps of one size for a whole model, coarser ones where a message would be too long.

With `q` the step, which is a multiple of the root mean square of the prunable kept numbers as a bfloat16, a
number `v` travels as round(v / q). See `safari.wire.budget` for what is done where that takes too many bytes.
"""

from __future__ import annotations

import numpy as np

from safari.wire.budget import (
    CENTRES,
    STEPS_FROM,
    at_most_bits,
    choose_rounding,
    size_classes,
    step_classes,
    steps_bits,
    tally,
)
from safari.wire.kept import Kept, Quantised
from safari.wire.scales import Wide, least_quantum, multiples, near_bf16, quantum


def step(kept: Kept, target: Wide, size: float, room: float | None) -> Quantised:
    """The nearest multiples of `size` root mean squares; `room`: about how many bits they may take."""
    scale = quantum(target, kept.steering, size)
    asked = Quantised(scale, multiples(target, scale)).signed(kept)
    return asked if room is None else _within(room, target, kept.steering, asked).signed(kept)


def _within(room: float, target: Wide, steering: int, asked: Quantised) -> Quantised:
    """The rounding that was asked for, or a coarser one of the prunable numbers where it needs more room."""
    if not steering or not asked.scales.any():
        return asked
    classes = step_classes(np.abs(asked.whole))
    counts = [np.bincount(part, minlength=STEPS_FROM.size) for part in np.split(classes, [steering])]
    if sum(map(at_most_bits, counts)) <= room:
        return asked
    negative = asked.whole < 0
    rest = room - steps_bits(tally(classes[steering:], negative[steering:], STEPS_FROM.size))
    if steps_bits(tally(classes[:steering], negative[:steering], STEPS_FROM.size)) <= rest:
        return asked
    leading = target[:steering]
    unit = float(quantum(target, steering, 1.0)[0])
    sizes, below = np.abs(leading) / unit, leading < 0
    chosen = choose_rounding(tally(size_classes(sizes), below, CENTRES.size), rest)
    scale = np.maximum(near_bf16(chosen.quantum * unit), least_quantum(target))
    steps = (sizes > chosen.beyond).astype(np.int32)
    if chosen.most > 1:
        steps *= np.clip(np.abs(multiples(leading, scale)), 1, chosen.most)
    if chosen.yields:
        even = steering & ~1
        first, second = sizes[:even:2], sizes[1:even:2]
        small = np.minimum(first, second)
        turned = (below[:even:2] != below[1:even:2]) & (small > 0) & (small <= chosen.yields)
        below[:even:2] ^= turned & (first < second)
        below[1:even:2] ^= turned & (first >= second)
    others = multiples(target[steering:], scale)
    return Quantised(scale, np.concatenate([np.where(below, -steps, steps), others]))
