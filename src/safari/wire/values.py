"""Numbers as symbols and raw bits, and back: one small codec for each coding of the format.

What a lossy mode makes of the numbers first is in `safari.wire.rounding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from safari.errors import SafariError, WireError
from safari.wire.bitmap import decode_bitmap, encode_bitmap
from safari.wire.bits import Bytes8, Fields, Reader, Words, field_bytes
from safari.wire.blocks import block_bits
from safari.wire.kept import Kept, Plan, Quantised
from safari.wire.layout import Bools, Floats, Ints
from safari.wire.scales import SCALE_BYTES, Wide, from_bf16, to_bf16
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

# Ways to write numbers, by their number on the wire. "none" is a mask without numbers; "sparse" writes some
# of the kept numbers in one of the other ways.
CODINGS = ("absolute", "difference", "bf16", "fp16", "int8", "qsgd", "step", "none", "sign", "sparse")
INTEGER = frozenset({"int8", "qsgd", "step"})
SCALED = INTEGER | {"sign"}
MAX_CODE = dict.fromkeys(CODINGS, 0) | {"difference": 3} | dict.fromkeys(INTEGER, 4)
# Codings in which every number has as many raw bits next to its symbol, and those that have no symbols.
RAW_BITS = {"absolute": 24, "bf16": 8, "fp16": 8, "none": 0, "sign": 1}
WITHOUT_SYMBOLS = frozenset({"none", "sign"})
# Symbols 1 to 255 of the difference mode turn with the exponent of the reference; 0 means no change.
RING = 255


@dataclass(frozen=True)
class Coded:
    """One way of writing the kept numbers: `code` goes into the header, `data` into the body."""

    code: int
    data: bytes


def encode_plan(plan: Plan, kept: Kept) -> Coded:
    """The kept numbers as planned."""
    written = plan.of(kept)
    coded = encode_values(plan.coding, written, plan.numbers)
    if plan.sent is None:
        return coded
    head = encode_bitmap(plan.sent, kept.counts) + bytes([CODINGS.index(plan.coding) | coded.code << 4])
    return Coded(0, head + coded.data)


def decoded_plan(plan: Plan, kept: Kept) -> Floats:
    """Numbers that a receiver decodes from `encode_plan`, without the bytes."""
    written = plan.of(kept)
    if plan.numbers is not None:
        change = plan.numbers.change(written.counts)
    elif plan.coding in ("absolute", "difference"):
        change = None
    else:
        change = _widened(plan.coding, _halves(plan.coding, written))
    numbers = written.values if change is None else _added(written.base, change)
    if plan.sent is None:
        return numbers
    out = np.zeros(kept.values.size, np.float32) if kept.base is None else kept.base.copy()
    out[plan.sent] = numbers
    return out


def encode_values(coding: str, kept: Kept, numbers: Quantised | None = None) -> Coded:
    """The numbers in that coding; `kept.base` is given where they travel as a difference, `numbers` where
    they are whole multiples of scales."""
    if numbers is not None:
        if coding == "sign":
            return Coded(
                0, _scale_bytes(numbers) + np.packbits(numbers.whole < 0, bitorder="little").tobytes()
            )
        return _integers(numbers, kept.counts)
    if coding == "absolute":
        return Coded(0, _rotated(kept.values.view(np.uint32), 32, kept.counts))
    if coding == "difference":
        return _difference(kept)
    return Coded(0, _rotated(_halves(coding, kept).astype(np.uint32), 16, kept.counts))


def value_reader(
    coding: str, code: int, relative: bool, reader: Reader, counts: Ints
) -> ValueReader | SparseReader:
    """A reader of the numbers that follow: as many as `counts` adds up to, to the end of the data."""
    if coding == "sparse":
        return SparseReader(relative, reader, counts)
    return ValueReader(coding, code, reader, counts)


class SparseReader:
    """Numbers of which only some were sent; the others are the reference's, or 0 where there is none."""

    def __init__(self, relative: bool, reader: Reader, counts: Ints):
        self._sent = decode_bitmap(reader, counts)
        coding, code = read_inner(reader, relative)
        self._inner = ValueReader(coding, code, reader, counts_of(self._sent, counts))
        self._done = 0

    def take(self, count: int, base: Floats | None) -> Floats:
        """Take the next `count` numbers, as `ValueReader.take` does."""
        sent = self._sent[self._done : self._done + count]
        out = np.zeros(count, np.float32) if base is None else base.copy()
        out[sent] = self._inner.take(int(np.count_nonzero(sent)), None if base is None else base[sent])
        self._done += count
        return out

    def finish(self) -> None:
        """Raise unless the data end here."""
        self._inner.finish()


def read_inner(reader: Reader, relative: bool) -> tuple[str, int]:
    """The coding of the numbers that a sparse message holds, and its code."""
    at = reader.at
    byte = reader.byte("inner coding")
    coding = CODINGS[byte & 15] if byte & 15 < len(CODINGS) else ""
    if coding in ("", "none", "sparse"):
        raise WireError(f"inner coding must be one that writes numbers, got {byte & 15}", at)
    if coding == "difference" and not relative:
        raise WireError("inner coding difference must be relative", at)
    code = byte >> 4
    if code > MAX_CODE[coding]:
        raise WireError(f"inner code of {coding} must be at most {MAX_CODE[coding]}, got {code}", at)
    return coding, code


def counts_of(bits: Bools, sizes: Ints) -> Ints:
    """Number of bits set in each of neighbouring pieces of those sizes."""
    edges = pairwise([0, *np.cumsum(sizes).tolist()])
    return np.array([np.count_nonzero(bits[lo:hi]) for lo, hi in edges], np.int64)


class ValueReader:
    """The inverse of `encode_values`: the numbers, a few at a time, to the end of the data.

    `counts`: how many numbers each entry has.
    """

    def __init__(self, mode: str, code: int, reader: Reader, counts: Ints):
        self._mode, self._code = mode, code
        self._ends = np.cumsum(counts)
        n = int(counts.sum())
        self._scales = _read_scales(mode, reader, counts.size) if mode in SCALED else None
        self._paired = mode in INTEGER and code == NIBBLES
        self._at = reader.at
        rows = (n + 1) >> 1 if self._paired else n
        self._row = decode_symbols(reader, 0 if mode in WITHOUT_SYMBOLS else rows)
        at = reader.at
        self._fields = Fields(reader.take(reader.left, "raw bits"), at, "raw bits")
        if mode in RAW_BITS:
            self._fields.check(RAW_BITS[mode] * n)
        self._done = 0
        # Whether the last number that was not 0 was negative.
        self._negative = False

    def take(self, count: int, base: Floats | None) -> Floats:
        """The next `count` numbers; `base` is what the reference holds there, if they are relative."""
        if self._mode == "none":
            return np.zeros(count, np.float32)
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
            numbers = _added(base, self._change(symbols, count))
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

    def _change(self, symbols: Bytes8, count: int) -> Wide:
        """Changes to be added to the reference's numbers."""
        if self._mode == "sign":
            return (1.0 - 2.0 * self._fields.take(count, 1)) * self._scales_of(count)
        if self._mode in INTEGER:
            return self._multiples(symbols)
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


def _added(base: Floats | None, change: Wide) -> Floats:
    """Changes as numbers: added to the reference's where there is one, in binary64, and rounded once."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (change if base is None else base.astype(np.float64) + change).astype(np.float32)


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


def _halves(mode: str, kept: Kept) -> Halves:
    """The nearest numbers of 16 bits; the next above where the nearest would cost a dense number its sign."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = kept.target.astype(np.float32)
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
    return Coded(best.code, _scale_bytes(numbers) + best.data)


def _scale_bytes(numbers: Quantised) -> bytes:
    return (numbers.scales.view(np.uint32) >> 16).astype("<u2").tobytes()


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
