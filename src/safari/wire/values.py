"""The kept numbers as symbols and raw bits, exactly or nearly: one small codec for each value mode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from safari.errors import SafariError, WireError
from safari.wire.bits import Bytes8, Fields, Reader, Words, field_bytes
from safari.wire.blocks import block_bits
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
from safari.wire.layout import Floats, Ints
from safari.wire.scales import (
    MOST_STEPS,
    SCALE_BYTES,
    Wide,
    by_entry,
    from_bf16,
    least_quantum,
    near_bf16,
    quantum,
    to_bf16,
)
from safari.wire.signs import Halves, next_above, sign_lost
from safari.wire.symbols import (
    NIBBLES,
    SHORT,
    alphabet,
    chained,
    decode_symbols,
    encode_symbols,
    fields_of,
    pair,
    plan_symbols,
    symbols_of,
    to_symbols,
    unchained,
    unpair,
    unzigzag,
    write_fields,
    zigzag,
)

VALUE_MODES = ("absolute", "difference", "bf16", "fp16", "int8", "qsgd", "step")
EXACT = frozenset({"absolute", "difference"})
INTEGER = frozenset({"int8", "qsgd", "step"})
MAX_CODE = {"absolute": 0, "difference": 3, "bf16": 0, "fp16": 0, "int8": 4, "qsgd": 4, "step": 4}
# Modes in which every number has as many raw bits beside its symbol.
RAW_BITS = {"absolute": 24, "bf16": 8, "fp16": 8}
# Symbols 1 to 255 of the difference mode turn with the exponent of the reference; 0 means no change.
RING = 255


@dataclass(frozen=True)
class Lossy:
    """The sender's choices for modes that do not keep every bit.

    `bits` is the size of a QSGD number (2 to 8), `step` the quantum of the step mode in units of the root
    mean square of what is sent, `rng` the source of QSGD's random rounding. `ratio`: where a frame of the
    step mode would be more than 1/ratio of the dense model, it is rounded more coarsely; 0: never.
    """

    bits: int = 4
    step: float = 1.0
    rng: np.random.Generator | None = None
    ratio: float = 60.0

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise SafariError(f"bits must be 2 to 8, got {self.bits}")
        if not (self.step > 0 and np.isfinite(self.step)):
            raise SafariError(f"step must be positive and finite, got {self.step}")
        if not (self.ratio >= 0 and np.isfinite(self.ratio)):
            raise SafariError(f"ratio must be finite and at least 0, got {self.ratio}")


@dataclass(frozen=True)
class Kept:
    """Kept numbers in wire order, what the reference holds there, and how many belong to each entry.

    `steering` is how many of them, from the first, set the quantum of the step mode: the prunable ones.
    """

    values: Floats
    base: Floats | None
    counts: Ints
    steering: int


@dataclass(frozen=True, eq=False)
class Quantised:
    """Numbers as whole multiples of a scale: one scale for each entry, or one for all (step mode)."""

    scales: Floats
    whole: npt.NDArray[np.int32]

    def part(self, entries: slice, numbers: slice) -> Quantised:
        """Those of some neighbouring entries."""
        return Quantised(self.scales if self.scales.size == 1 else self.scales[entries], self.whole[numbers])


@dataclass(frozen=True)
class Coded:
    """One way of writing the kept numbers: `code` goes into the header, `data` into the body."""

    code: int
    data: bytes


def encode_values(mode: str, kept: Kept, numbers: Quantised | None = None) -> Coded:
    """The numbers in that mode; `kept.base` is given where they travel as a difference, `numbers` where they
    are whole multiples of scales."""
    if numbers is not None:
        return _integers(numbers, kept.counts)
    if mode == "absolute":
        return Coded(0, _rotated(kept.values.view(np.uint32), 32, kept.counts))
    if mode == "difference":
        return _difference(kept)
    return Coded(0, _rotated(_halves(mode, kept).astype(np.uint32), 16, kept.counts))


class ValueReader:
    """The inverse of `encode_values`: the numbers of a body, a few at a time, to the end of the data.

    `counts`: how many numbers each entry has.
    """

    def __init__(self, mode: str, code: int, reader: Reader, counts: Ints):
        self._mode, self._code = mode, code
        self._ends = np.cumsum(counts)
        n = int(counts.sum())
        self._scales = _read_scales(mode, reader, counts.size) if mode in INTEGER else None
        self._paired = mode in INTEGER and code == NIBBLES
        self._at = reader.at
        self._row = decode_symbols(reader, (n + 1) >> 1 if self._paired else n)
        at = reader.at
        self._fields = Fields(reader.take(reader.left, "raw bits"), at, "raw bits")
        if mode in RAW_BITS:
            self._fields.check(RAW_BITS[mode] * n)
        self._done = 0
        # Whether the last number that was not 0 was negative.
        self._negative = False

    def take(self, count: int, base: Floats | None) -> Floats:
        """The next `count` numbers; `base` is what the reference holds there, if they are relative."""
        symbols = self._symbols(count)
        if self._mode == "absolute":
            raw = self._fields.take(count, RAW_BITS["absolute"])
            wide = symbols.astype(np.uint32)
            numbers = (((wide << 23) | (raw >> 1)) | (raw << 31)).view(np.float32)
        elif self._mode == "difference":
            if base is None:
                raise SafariError("difference mode needs a reference")
            numbers = self._differences(symbols, base)
        else:
            change = self._multiples(symbols) if self._mode in INTEGER else self._halves(symbols)
            with np.errstate(over="ignore", invalid="ignore"):
                numbers = (change if base is None else base.astype(np.float64) + change).astype(np.float32)
        self._done += count
        return numbers

    def finish(self) -> None:
        """Raise unless the data end here."""
        self._fields.finish()

    def _symbols(self, count: int) -> Bytes8:
        if not self._paired:
            return self._row[self._done : self._done + count]
        odd = self._done & 1
        row = self._row[self._done >> 1 : (self._done + count + 1) >> 1]
        return unpair(row, odd + count)[odd:]

    def _differences(self, turned: Bytes8, base_floats: Floats) -> Floats:
        base = base_floats.view(np.uint32)
        symbols = (turned.astype(np.int64) - 1 - _turn(base, self._code)) % RING + 1
        symbols[turned == 0] = 0
        change = unzigzag(self._whole(symbols))
        return unordered(ordered(base) + change.view(np.uint32)).view(np.float32)

    def _halves(self, symbols: Bytes8) -> Wide:
        turned = (symbols.astype(np.uint32) << 8) | self._fields.take(symbols.size, RAW_BITS[self._mode])
        return _widened(self._mode, ((turned >> 1) | (turned << 15)).astype(np.uint16))

    def _multiples(self, symbols: Bytes8) -> Wide:
        whole = unchained(unzigzag(self._whole(symbols)), self._negative)
        moved = np.flatnonzero(whole)
        if moved.size:
            self._negative = bool(whole[moved[-1]] < 0)
        return whole * self._scales_of(whole.size)

    def _scales_of(self, count: int) -> Wide:
        """The scale of each of the next numbers."""
        if self._scales is None or self._mode == "step":
            return np.empty(0) if self._scales is None else self._scales
        last = self._done + count - 1
        first, stop = np.searchsorted(self._ends, [self._done, last], "right").tolist()
        edges = np.clip(self._ends[first : stop + 1] - self._done, 0, count)
        return np.repeat(self._scales[first : stop + 1], np.diff(edges, prepend=0))

    def _whole(self, symbols: Ints | Bytes8) -> Words:
        """Whole numbers from their symbols and the raw bits."""
        table = alphabet(self._code)
        if symbols.size and int(symbols.max()) >= table.base.size:
            raise WireError(f"symbols must be below {table.base.size}, got {int(symbols.max())}", self._at)
        numbers = table.base.take(symbols) + self._fields.take(symbols.size, table.width.take(symbols))
        if symbols.size and int(numbers.max()) > 0xFFFFFFFF:
            raise WireError(f"numbers must be at most {0xFFFFFFFF}, got {int(numbers.max())}", self._at)
        return numbers.astype(np.uint32)


def _read_scales(mode: str, reader: Reader, entries: int) -> Wide:
    at = reader.at
    stored = reader.take(SCALE_BYTES * (1 if mode == "step" else entries), "scales")
    scales = from_bf16(np.frombuffer(stored, "<u2"))
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise WireError("scales must be finite and at least 0", at)
    return scales.astype(np.float64)


def ordered(bits: Words) -> Words:
    """Float bits as unsigned integers in the order of the floats (also its own kind of NaN at each end)."""
    negative = (bits.view(np.int32) >> 31).view(np.uint32)
    return bits ^ (negative | np.uint32(0x80000000))


def unordered(numbers: Words) -> Words:
    """The inverse of `ordered`."""
    positive = (numbers.view(np.int32) >> 31).view(np.uint32)
    return numbers ^ (~positive | np.uint32(0x80000000))


def _rotated(bits: Words, width: int, counts: Ints) -> bytes:
    """The sign moved to the bottom; the top byte, mostly exponent, is the symbol, the rest is raw."""
    turned = (bits << 1) | (bits >> (width - 1))
    raw_bits = width - 8
    symbols = (turned >> raw_bits).astype(np.uint8)
    return encode_symbols(symbols, counts) + write_fields(
        turned.astype(np.uint32) & np.uint32((1 << raw_bits) - 1), raw_bits
    )


def _difference(kept: Kept) -> Coded:
    if kept.base is None:
        raise SafariError("difference mode needs a reference")
    base = kept.base.view(np.uint32)
    change = zigzag((ordered(kept.values.view(np.uint32)) - ordered(base)).view(np.int32))
    # A finer alphabet fits the shape of the distribution better; short rows may not pay for its table.
    codes = range(4) if kept.values.size <= SHORT else (3,)
    return _shortest({code: _turned(code, change, base) for code in codes}, kept.counts)


def _turned(code: int, change: Words, base: Words) -> tuple[Bytes8, Words, Bytes8]:
    symbols, fields, widths = to_symbols(change, code)
    turned = (symbols.astype(np.int64) - 1 + _turn(base, code)) % RING + 1
    turned[symbols == 0] = 0
    return turned.astype(np.uint8), fields, widths


def _turn(base: Words, code: int) -> Ints:
    return ((base >> 23) & np.uint32(255)).astype(np.int64) << code


def _target(kept: Kept) -> Wide:
    values = kept.values.astype(np.float64)
    if kept.base is None:
        return values
    with np.errstate(invalid="ignore"):
        return values - kept.base


def _halves(mode: str, kept: Kept) -> Halves:
    """The nearest numbers of 16 bits; the next above where the nearest would cost a dense number its sign."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = _target(kept).astype(np.float32)
        halves = to_bf16(narrow) if mode == "bf16" else narrow.astype(np.float16).view(np.uint16)
        if kept.base is None:
            return halves
        dense = halves[kept.steering :]
        above = next_above(dense)
        lost = sign_lost(kept.values[kept.steering :], kept.base[kept.steering :], _widened(mode, dense))
        # Above the largest there is none.
        lost &= np.isfinite(_widened(mode, above))
    return np.concatenate([halves[: kept.steering], np.where(lost, above, dense)])


def _widened(mode: str, halves: Halves) -> Wide:
    with np.errstate(invalid="ignore"):
        return (from_bf16(halves) if mode == "bf16" else halves.view(np.float16)).astype(np.float64)


def quantise(mode: str, kept: Kept, lossy: Lossy, room: float | None = None) -> Quantised | None:
    """The whole model's numbers as multiples of scales, in the modes that send such; packets share them.

    `room`: about how many bits they may take in the step mode, by a coarser rounding if need be.

    >>> kept = Kept(np.array([2.54, -1.0, 3.0], np.float32), None, np.array([2, 1]), 3)
    >>> found = quantise("int8", kept, Lossy())
    >>> found.scales.tolist(), found.whole.tolist()
    ([0.02001953125, 0.023681640625], [127, -50, 127])
    """
    if mode not in INTEGER:
        return None
    target = _target(kept)
    if not np.isfinite(target).all():
        raise SafariError(f"{mode} mode needs finite values")
    if mode == "step":
        asked = _signed(kept, _multiples(target, quantum(target, kept.steering, lossy.step)))
        return asked if room is None else _signed(kept, _within(room, target, kept.steering, asked))
    levels = levels_of(mode, lossy.bits)
    scales = by_entry(target, kept.counts, levels)
    # A scale is 0 only where all its numbers are.
    exact = target / np.repeat(np.where(scales > 0, scales, 1).astype(np.float64), kept.counts)
    if mode == "qsgd":
        if lossy.rng is None:
            raise SafariError("qsgd mode needs rng, the generator that rounds")
        whole = np.floor(exact + lossy.rng.random(exact.size))
    else:
        whole = np.rint(exact)
    return _signed(kept, Quantised(scales, whole.astype(np.int32).clip(-levels, levels)))


def _signed(kept: Kept, numbers: Quantised) -> Quantised:
    """One multiple more where a dense number would lose its sign.

    That is enough, for a rounding is less than one scale off, and never beyond the last level: the last level
    leads to the value or further.
    """
    if kept.base is None:
        return numbers
    scales = numbers.scales.astype(np.float64)
    each = scales if scales.size == 1 else np.repeat(scales, kept.counts)[kept.steering :]
    dense = numbers.whole[kept.steering :]
    lost = sign_lost(kept.values[kept.steering :], kept.base[kept.steering :], dense * each)
    if not lost.any():
        return numbers
    return Quantised(numbers.scales, np.concatenate([numbers.whole[: kept.steering], dense + lost]))


def _multiples(target: Wide, scale: Floats) -> Quantised:
    """The nearest multiples of one scale."""
    wide = float(scale[0]) if scale.size else 0.0
    exact = target / wide if wide else np.zeros_like(target)
    return Quantised(scale, np.clip(np.rint(exact), -MOST_STEPS, MOST_STEPS).astype(np.int32))


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
        steps *= np.clip(np.abs(_multiples(leading, scale).whole), 1, chosen.most)
    if chosen.yields:
        even = steering & ~1
        first, second = sizes[:even:2], sizes[1:even:2]
        small = np.minimum(first, second)
        turned = (below[:even:2] != below[1:even:2]) & (small > 0) & (small <= chosen.yields)
        below[:even:2] ^= turned & (first < second)
        below[1:even:2] ^= turned & (first >= second)
    others = _multiples(target[steering:], scale).whole
    return Quantised(scale, np.concatenate([np.where(below, -steps, steps), others]))


def levels_of(mode: str, bits: int) -> int:
    """The largest multiple of the scale that a number of int8 or qsgd can be."""
    return 127 if mode == "int8" else (1 << (bits - 1)) - 1


def _integers(numbers: Quantised, counts: Ints) -> Coded:
    folded = zigzag(chained(numbers.whole))
    codes = range(NIBBLES + 1) if folded.size <= SHORT else (3, NIBBLES)
    symbols = {code: symbols_of(folded, code) for code in codes}
    if folded.size > SHORT:
        code = min(codes, key=lambda code: _about_bits(symbols[code], code))
        symbols = {code: symbols[code]}
    rows = {code: (row, *fields_of(folded, row, code)) for code, row in symbols.items()}
    if NIBBLES in rows:
        rows[NIBBLES] = pair(symbols[NIBBLES]), *rows[NIBBLES][1:]
    best = _shortest(rows, counts)
    halves = (numbers.scales.view(np.uint32) >> 16).astype("<u2")
    return Coded(best.code, halves.tobytes() + best.data)


def _shortest(rows: dict[int, tuple[Bytes8, Words, Bytes8]], counts: Ints) -> Coded:
    """Symbols, fields and widths by code, written in the code that makes them shortest."""
    halved = np.diff((np.cumsum(counts) + 1) >> 1, prepend=0)
    ways = {
        code: plan_symbols(symbols, halved if code == NIBBLES else counts, paired=code == NIBBLES)
        for code, (symbols, *_) in rows.items()
    }
    code = min(ways, key=lambda c: ways[c].size + field_bytes(int(rows[c][2].sum(dtype=np.int64))))
    symbols, fields, widths = rows[code]
    return Coded(code, ways[code].write(symbols) + write_fields(fields, widths))


def _about_bits(symbols: Bytes8, code: int) -> float:
    counts = np.bincount(pair(symbols) if code == NIBBLES else symbols, minlength=256)
    width = alphabet(code).width.astype(np.int64)
    both = np.add.outer(width, width).ravel() if code == NIBBLES else width
    return block_bits(counts.astype(np.float64)) + float(counts[: both.size] @ both)
