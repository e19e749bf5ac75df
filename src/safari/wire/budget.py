"""Choose how coarsely the step mode rounds so that an upload is at most a given share of the dense model.

Everything here follows from whole numbers that are counted over the update, so that every device
that counts them arrives at the same rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from safari.wire.blocks import TABLE_BITS, TABLE_BITS_PER_SYMBOL
from safari.wire.huffman import LONGEST, word_lengths
from safari.wire.layout import Bools, Ints
from safari.wire.scales import MOST_STEPS, Wide

Small = npt.NDArray[np.int16]
Integers = npt.NDArray[np.integer]

# Magnitudes in whole steps with a symbol of their own, or with one and this many raw bits (alphabet 4, halved).
STEPS_FROM = np.array([0, 1, 2, 3, 4, 5, 6, 14, 142, 32910])
STEPS_WIDTH = np.array([0, 0, 0, 0, 0, 0, 4, 8, 16, 32])
# Pairs of such, each with its sign.
MOST_WORDS = (2 * STEPS_FROM.size - 1) ** 2
# Magnitudes in units of the root mean square: class 0 is zero itself, class i lies above EDGES[i - 1] and up
# to EDGES[i]; the last has no end.
EDGES = np.array([0, 0.0625, *np.arange(1, 17) / 8, 2.5, 3, 3.5, 4, 5, 6, 8])
CENTRES = np.array([0, *(EDGES[:-1] + EDGES[1:]) / 2, 10.0])
# Edges are multiples of one over this.
FINER = 16
# What there is to choose from. Any multiple of a step, and what becomes 0:
COARSE = ((1.25, 0.75), (1.5, 0.875), (2.0, 1.25), (2.5, 1.5))
# plus or minus one value, and what becomes 0:
BEYOND = (0.0625, 0.125, 0.25, 0.5, 0.75, 1.0, 1.25)
# plus or minus one value for everything that moved, and up to where a number yields to its neighbour.
YIELDING = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, math.inf)
# No more of an update may go missing: half of its square.
MOST_LOST = 0.5
# The heads of a frame that relies on everything, its scale, and the start of its symbols.
HEAD_BITS = 8 * (18 + 16 + 2 + 8)
# Deflate has a word for it in every block; where there are few others, that makes one of them longer.
END_OF_BLOCK = np.ones(1)
# Real rows vary from what is estimated for them.
SURE = 1.01


@dataclass(frozen=True)
class Rounding:
    """Rounding of the prunable numbers, in units of their root mean square.

    A number up to `beyond` in magnitude becomes 0, others the nearest multiple of `quantum`, at least 1 and at
    most `most` of them. Then, in each pair of neighbours that are not 0 and have unlike signs, the smaller
    (of equals the second) takes the sign of the larger if it is at most `yields`.
    """

    quantum: float
    beyond: float
    most: int
    yields: float = 0.0


def room_bits(numbers: int, ratio: float) -> float:
    """Bits that the mask and the numbers may take in a frame that is `ratio` times below dense."""
    return 32 * numbers / ratio - HEAD_BITS


def coded_bits(ways: Sequence[Ints], starts: Ints) -> float:
    """About how many bits a bitmap takes, given how many bits are set in each entry and where entries begin
    (and the last one ends): of several bitmaps that would do, the shortest.

    >>> coded_bits([np.array([4, 0])], np.array([0, 8, 16]))
    8.0
    """
    sizes = np.diff(starts)
    return min((_spread(sizes) - _spread(way) - _spread(sizes - way) for way in ways), default=0.0)


def _spread(counts: Ints) -> float:
    return float(counts @ np.log2(np.maximum(counts, 1)))


def step_classes(steps: Integers) -> Small:
    """The classes of magnitudes in whole steps."""
    found: Small = _STEP_CLASS.take(np.minimum(steps, STEPS_FROM[-2]))
    found[steps >= STEPS_FROM[-1]] += 1
    return found


def size_classes(sizes: Wide) -> Small:
    """The classes of magnitudes in units of the root mean square.

    >>> size_classes(np.array([0, 0.1, 0.125, 0.13, 99])).tolist()
    [0, 2, 2, 3, 25]
    """
    places = np.ceil(np.minimum(sizes, 2 * EDGES[-1]) * FINER)
    found: Small = _SIZE_CLASS.take(places.astype(np.int64))
    return found


def tally(classes: Small, negative: Bools, of: int) -> Ints:
    """Count successive numbers by their classes and whether their signs agree:
    `int64[of, 2, of]`, by the first's class, whether the signs agree, and the second's class."""
    agree = negative[1:] == negative[:-1]
    codes = (classes[:-1] * 2 + agree) * of + classes[1:]
    return np.bincount(codes, minlength=2 * of * of).reshape(of, 2, of)


def agreeing(pairs: Ints) -> float:
    """Fraction of the non-zero numbers after a non-zero one that have its sign; a half if there are none."""
    moved = pairs[1:, :, 1:].sum(axis=(0, 2))
    return float(moved[1] / moved.sum()) if moved.any() else 0.5


def steps_bits(pairs: Ints, agree: float | None = None) -> float:
    """About how many bits numbers with these neighbours take, two at a time in a Huffman code.

    `pairs` is a tally by the classes of `STEPS_FROM`; a number that follows none in its pair has the sign of
    the last one before with probability `agree`.
    """
    total = int(pairs.sum())
    if not total:
        return 0.0
    like = agreeing(pairs) if agree is None else agree
    signs = np.array([1 - like, like])
    after = pairs[1:, None] * signs[:, None, None]
    zero = pairs[0].sum(axis=0)
    words = np.concatenate(
        [
            after[..., 1:].ravel(),
            after[..., 0].sum(axis=2).ravel(),
            np.outer(signs, zero[1:]).ravel(),
            zero[:1],
            END_OF_BLOCK,
        ]
    )
    words = words[words > 0]
    # Every number but the ends is in two neighbouring pairs, and is written in one.
    coded = float(words @ word_lengths(words.tolist())) / 2
    table = TABLE_BITS + TABLE_BITS_PER_SYMBOL * int((words >= 2).sum())
    raw = float(pairs.sum(axis=(0, 1)) @ STEPS_WIDTH)
    return SURE * (coded + raw) * (total + 1) / total + table


def at_most_bits(counts: Ints) -> float:
    """A bound on `steps_bits` from how many numbers are in each class of `STEPS_FROM`: one at a time, the
    class in a Huffman code, then the sign and the raw bits. It shows at once that most uploads fit."""
    total = int(counts.sum())
    if total < 2:
        return 0.0
    seen = counts[counts > 0]
    bits = seen @ word_lengths(seen.tolist()) + counts[1:].sum() + counts @ STEPS_WIDTH
    # The end of the block takes the word of some pair, which then has one more bit.
    bits += (seen.min() + LONGEST) / 2
    return SURE * float(bits) * total / (total - 1) + TABLE_BITS + TABLE_BITS_PER_SYMBOL * MOST_WORDS


def choose_rounding(pairs: Ints, room: float) -> Rounding:
    """The rounding with the least error that fits; where none does, plus or minus one value for all.

    `pairs` is a tally by the classes of `EDGES`; `room` is in bits.
    """
    # Every number but the ends is in two pairs; errors and steps are those of either.
    first, second = np.meshgrid(CENTRES, CENTRES, indexing="ij")
    counts = pairs.sum(axis=1)
    options = dict(_options(pairs, first, second))
    limit = MOST_LOST * float((counts * (first**2 + second**2)).sum())
    ranked = sorted(options, key=lambda option: options[option])
    usable = [option for option in ranked if options[option] <= limit] or ranked[:1]
    agree = agreeing(pairs)
    for option in usable:
        if steps_bits(_rounded(pairs, option), agree) <= room:
            return option
    # What loses more than the signs is not worth the bytes that it saves.
    return next((option for option in usable if option.beyond == option.yields == 0), usable[-1])


def _options(pairs: Ints, first: Wide, second: Wide) -> Iterator[tuple[Rounding, float]]:
    """The roundings to choose from, and what each loses of the sum of squares."""
    counts = pairs.sum(axis=1)
    for quantum, beyond in COARSE:
        yield _weighed(Rounding(quantum, beyond, MOST_STEPS), counts, first, second)
    for beyond in BEYOND:
        sent = counts * ((first > beyond) * first + (second > beyond) * second)
        number = counts * ((first > beyond) + 1.0 * (second > beyond))
        if number.any():
            mean = float(sent.sum() / number.sum())
            yield _weighed(Rounding(mean, beyond, 1), counts, first, second)
    number = counts * ((first > 0) + 1.0 * (second > 0))
    for yields in YIELDING if number.any() else ():
        yielding = pairs[:, 0] * _yielding(yields)
        small = np.minimum(first, second)
        sent = counts * (first + second) - 2 * yielding * small
        mean = float(sent.sum() / number.sum())
        # Where as much would yield as is left, that is 0, and nothing would be sent.
        if mean > 0:
            option, error = _weighed(Rounding(mean, 0.0, 1, yields), counts, first, second)
            yield option, error + 4 * mean * float((yielding * small).sum())


def _weighed(option: Rounding, counts: Ints, first: Wide, second: Wide) -> tuple[Rounding, float]:
    near = option.quantum * _steps(option)
    missing = (first - near[:, None]) ** 2 + (second - near) ** 2
    return option, float((counts * missing).sum())


def _steps(option: Rounding) -> Ints:
    """Number of steps that each class of `EDGES` becomes."""
    near = np.clip(np.rint(CENTRES / option.quantum), 1, option.most)
    return np.where(option.beyond < CENTRES, near, 0).astype(np.int64)


def _yielding(yields: float) -> Bools:
    """In which pairs of classes, if their signs are unlike, the smaller number takes that of the larger."""
    small = np.minimum(CENTRES[:, None], CENTRES)
    return np.asarray((small > 0) & (small <= yields))


def _rounded(pairs: Ints, option: Rounding) -> Ints:
    """A tally by `EDGES` as one by `STEPS_FROM`, of what becomes of the numbers."""
    yielding = pairs[:, 0] * _yielding(option.yields)
    signed = pairs + np.stack([-yielding, yielding], axis=1)
    to = np.eye(STEPS_FROM.size, dtype=np.int64)[step_classes(_steps(option))]
    return np.asarray(np.einsum("isj,ia,jb->asb", signed, to, to, optimize=True))


_STEP_CLASS: Small = (np.searchsorted(STEPS_FROM, np.arange(STEPS_FROM[-2] + 1), "right") - 1).astype(
    np.int16
)
_SIZE_CLASS: Small = np.searchsorted(EDGES, np.arange(2 * FINER * EDGES[-1] + 1) / FINER).astype(np.int16)
