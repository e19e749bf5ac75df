"""Masks (or their flips) as bytes: for each segment the shorter of packed bits and Rice-coded gaps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from safari.errors import WireError
from safari.wire.bits import (
    ONES,
    Bytes8,
    Fields,
    Reader,
    field_bytes,
    inflate,
    read_unary,
    rice_encode,
    varint,
)
from safari.wire.blocks import blocks_bits, code_lengths, deflate_segments, histograms, table_bits
from safari.wire.huffman import check_rows, decode_rows, encode_rows, sparse_code
from safari.wire.layout import Bools, Ints

PACKED = 31
MODELLED = 32
COMPLEMENT = 128
MAX_RICE = 24
# Up to this many bits a Huffman table does not pay; packed bits are then as long as they are many.
SHORT = 4096
# Codes that follow from two numbers are for packets: one Huffman table suits a whole model better and decodes
# several times faster.
MODEL_UP_TO = 1 << 15


@dataclass(frozen=True, eq=False)
class _Segment:
    """One segment and the ways to write it: which bits are rarer, and what each way takes."""

    bits: Bools
    complement: bool
    count: int
    k: int
    rice_bits: float

    @cached_property
    def packed(self) -> Bytes8:
        return np.packbits(self.bits, bitorder="little")

    @property
    def places(self) -> Ints:
        return np.flatnonzero(self.bits != self.complement)


def encode_bitmap(bits: Bools, sizes: Ints) -> bytes:
    """The bits of consecutive segments of those sizes."""
    sizes = sizes[sizes > 0]
    if not sizes.size:
        return b""
    segments = _examined(np.split(bits, np.cumsum(sizes)[:-1]), sizes)
    packed = _packed_is_shorter(segments, sizes)
    out = _written(segments, packed.tolist(), [None] * len(segments))
    if bits.size > MODEL_UP_TO:
        return out
    models = [_modelled(segment) for segment in segments]
    return min(out, _written(segments, [False] * len(segments), models), key=len)


def _examined(pieces: list[Bools], sizes: Ints) -> list[_Segment]:
    ones = np.array([np.count_nonzero(piece) for piece in pieces], np.int64)
    complement = ones * 2 > sizes
    counts = np.where(complement, sizes - ones, ones)
    k, rice_bits = _rice_plan(counts, sizes)
    columns = (complement.tolist(), counts.tolist(), k.tolist(), rice_bits.tolist())
    return [_Segment(*row) for row in zip(pieces, *columns, strict=True)]


def _written(segments: list[_Segment], packed: list[bool], models: list[Model | None]) -> bytes:
    """Segments as packed bits, under a model where there is one, otherwise as gaps."""
    tags, rows, gaps, widths, modelled = [], [], [], [], []
    for segment, pack, model in zip(segments, packed, models, strict=True):
        if pack:
            tags.append(bytes([PACKED]))
            rows.append(segment.packed)
        elif model is not None:
            flag = COMPLEMENT if model.complement else 0
            tags.append(bytes([MODELLED | flag, model.density, model.blanks]))
            modelled.append(model)
        else:
            flag = COMPLEMENT if segment.complement else 0
            tags.append(bytes([segment.k | flag]) + varint(segment.count))
            gaps.append(np.diff(segment.places, prepend=-1) - 1)
            widths.append(np.full(segment.count, segment.k, np.uint8))
    out = b"".join(tags)
    if rows:
        stream = deflate_segments(np.concatenate(rows), np.array([row.size for row in rows]))
        out += varint(len(stream)) + stream
    if modelled:
        out += encode_rows([m.row for m in modelled], [sparse_code(m.density, m.blanks) for m in modelled])
    if gaps:
        unary, remainders = rice_encode(np.concatenate(gaps), np.concatenate(widths))
        out += unary + remainders
    return out


def decode_bitmap(reader: Reader, sizes: Ints, bits: Bools | None = None) -> Bools:
    """The inverse of `encode_bitmap`.

    Every count is checked before anything of its size is made. `bits`: where to write the result, all False.
    """
    sizes = sizes[sizes > 0]
    k = np.zeros(sizes.size, np.uint8)
    counts = np.zeros(sizes.size, np.int64)
    packed, complement = np.zeros((2, sizes.size), np.bool_)
    models: dict[int, tuple[int, int]] = {}
    for i, size in enumerate(sizes.tolist()):
        at = reader.at
        tag = reader.byte("mask tag")
        if tag == PACKED:
            packed[i] = True
            continue
        complement[i] = bool(tag & COMPLEMENT)
        if tag & ~COMPLEMENT == MODELLED:
            models[i] = _read_model(reader)
            continue
        k[i] = tag & ~COMPLEMENT
        if k[i] > MAX_RICE:
            known = f"{PACKED}, {MODELLED} or a Rice parameter up to {MAX_RICE}"
            raise WireError(f"mask tag must be {known}, got {tag}", at)
        counts[i] = reader.varint("mask count", size)
    if bits is None:
        bits = np.zeros(int(sizes.sum()), np.bool_)
    starts = np.cumsum(sizes) - sizes
    if packed.any():
        _read_packed(reader, bits, starts[packed], sizes[packed])
    if models:
        chosen = list(models)
        _read_modelled(reader, bits, starts[chosen], sizes[chosen], list(models.values()))
    if counts.any():
        some = counts > 0
        _read_rice(reader, bits, starts[some], sizes[some], counts[some], k[some])
    for i in np.flatnonzero(complement).tolist():
        piece = bits[starts[i] : starts[i] + sizes[i]]
        np.logical_not(piece, out=piece)
    return bits


def _rice_plan(counts: Ints, sizes: Ints) -> tuple[Bytes8, npt.NDArray[np.float64]]:
    """A Rice parameter for each segment and about the bits that it then takes.

    Gaps add up to the same in whatever order they come, so that the length for geometric gaps tells enough.
    """
    p = np.clip(counts / sizes, 1e-9, 0.5)[:, None]
    powers = np.arange(MAX_RICE + 1)
    tail = (1 - p) ** (2.0**powers)
    lengths = powers + 1 + tail / (1 - tail)
    k = np.argmin(lengths, axis=1)
    return k.astype(np.uint8), counts * lengths[np.arange(k.size), k]


def _packed_is_shorter(segments: list[_Segment], sizes: Ints) -> Bools:
    best = sizes.astype(np.float64)
    if sizes.sum() > SHORT:
        rows = histograms(np.concatenate([segment.packed for segment in segments]), (sizes + 7) >> 3)
        overall = rows.sum(axis=0)
        shared = rows @ code_lengths(overall) + table_bits(overall) * sizes / sizes.sum()
        own = blocks_bits(rows)
        best = np.minimum(np.minimum(shared, own), best)
    # Packed bits decode several times faster, so that Rice codes must save at least a hundredth.
    return np.asarray(0.99 * best < np.array([segment.rice_bits for segment in segments]) + 16)


@dataclass(frozen=True, eq=False)
class Model:
    """Bits, eight at a time: `blanks` of 64 bytes are 0 for a reason of their own, the others have `density`
    of 128 bits set. With `complement` that is said of the bits' opposites."""

    row: Bytes8
    complement: bool
    density: int
    blanks: int


def _modelled(segment: _Segment) -> Model | None:
    """The model that fits a segment, where it is shorter than gaps."""
    plain = segment.packed
    complement = int((plain == 255).sum()) > int((plain == 0).sum())
    row = np.packbits(~segment.bits, bitorder="little") if complement else plain
    counts = np.bincount(row, minlength=256)
    model = Model(row, complement, *_fitted(int(counts[0]), row.size, int(counts @ ONES.astype(np.int64))))
    shorter = sparse_code(model.density, model.blanks).bits(counts) + 8 < segment.rice_bits
    return model if shorter else None


def _fitted(zeros: int, size: int, ones: int) -> tuple[int, int]:
    """Density and blanks by expectation and maximisation: how many of the zero bytes need no explanation."""
    blank, p = 0.5 * zeros / size, 0.5
    for _ in range(12):
        p = min(max(ones / max(8 * (size - blank * size), 1.0), 1 / 128), 127 / 128)
        chance = (1 - blank) * (1 - p) ** 8
        blank = zeros / size * blank / (blank + chance) if blank else 0.0
    return min(max(round(128 * p), 1), 127), min(round(64 * blank), 63)


def _read_model(reader: Reader) -> tuple[int, int]:
    at = reader.at
    density, blanks = reader.take(2, "mask model")
    if not 1 <= density <= 127 or blanks > 63:
        raise WireError(f"mask model must be 1 to 127 and 0 to 63, got {density} and {blanks}", at)
    return density, blanks


def _read_packed(reader: Reader, bits: Bools, starts: Ints, sizes: Ints) -> None:
    expected = int(((sizes + 7) >> 3).sum())
    length = reader.varint("mask bits length", 2 * expected + 64)
    at = reader.at
    data = inflate(reader.take(length, "mask bits"), expected, at)
    rows = np.split(np.frombuffer(data, np.uint8), np.cumsum((sizes + 7) >> 3)[:-1])
    _unpack(rows, bits, starts, sizes, at)


def _read_modelled(
    reader: Reader, bits: Bools, starts: Ints, sizes: Ints, models: list[tuple[int, int]]
) -> None:
    at = reader.at
    lengths = ((sizes + 7) >> 3).tolist()
    check_rows(lengths, "mask bits", at)
    rows = decode_rows(reader, lengths, (sparse_code(*model) for model in models), "mask bits")
    _unpack(rows, bits, starts, sizes, at)


def _unpack(rows: list[Bytes8], bits: Bools, starts: Ints, sizes: Ints, at: int) -> None:
    for row, start, size in zip(rows, starts.tolist(), sizes.tolist(), strict=True):
        if size & 7 and row[-1] >> (size & 7):
            raise WireError("mask bits beyond the end of a segment must be 0", at)
        bits[start : start + size] = np.unpackbits(row, count=size, bitorder="little").view(np.bool_)


def _read_rice(reader: Reader, bits: Bools, starts: Ints, sizes: Ints, counts: Ints, k: Bytes8) -> None:
    """Set the places of segments that have some; `starts` to `k` have an item for each of them."""
    wide = k.astype(np.int64)
    total = int(counts.sum())
    unary = read_unary(reader, total, total + int((sizes >> wide).sum()), "mask unary part")
    at = reader.at
    size = field_bytes(int((counts * wide).sum()))
    remainders = Fields(reader.take(size, "mask remainders"), at, "mask remainders")
    ends = np.cumsum(counts)
    done, last = 0, -1
    for quotients in unary:
        # Which segments these numbers belong to, and how many of them to each.
        first, stop = np.searchsorted(ends, [done, done + quotients.size - 1], "right").tolist()
        here = slice(first, stop + 1)
        edges = np.clip(ends[here] - done, 0, quotients.size)
        each = np.diff(edges, prepend=0)
        widths = np.repeat(k[here], each)
        steps = (quotients << widths.astype(np.int64)) + remainders.take(quotients.size, widths) + 1
        places = np.cumsum(steps)
        # Places count from the start of their segment; the first one here may go on from the last chunk.
        before = np.concatenate([[0], places])[edges - each]
        origin = starts[here] - 1
        if ends[first] - counts[first] < done:
            origin[0] = last
        places += np.repeat(origin - before, each)
        if (places[edges - 1] >= (starts + sizes)[here]).any():
            raise WireError("mask gaps run beyond the end of their segment", at)
        bits[places] = True
        done, last = done + quotients.size, int(places[-1])
