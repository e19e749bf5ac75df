"""Masks (or their flips) as bytes: for each segment the shorter of packed bits and Rice-coded gaps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from safari.errors import WireError
from safari.wire.bits import (
    Bytes8,
    Reader,
    as_bools,
    field_bytes,
    inflate,
    read_unary,
    rice_encode,
    unpack_fields,
    varint,
)
from safari.wire.blocks import block_bits, code_lengths, deflate_segments, histograms, table_bits
from safari.wire.layout import Bools, Ints

PACKED = 31
COMPLEMENT = 128
MAX_RICE = 24
# Up to this many bits a Huffman table does not pay; packed bits are then as long as they are many.
SHORT = 4096


def encode_bitmap(bits: Bools, sizes: Ints) -> bytes:
    """The bits of consecutive segments of those sizes."""
    sizes = sizes[sizes > 0]
    if not sizes.size:
        return b""
    segments = np.split(bits, np.cumsum(sizes)[:-1])
    ones = np.array([np.count_nonzero(segment) for segment in segments], np.int64)
    complement = ones * 2 > sizes
    counts = np.where(complement, sizes - ones, ones)
    k, rice_bits = _rice_plan(counts, sizes)
    packed = [np.packbits(segment, bitorder="little") for segment in segments]
    use_packed = _packed_is_shorter(packed, sizes, rice_bits)

    tags, rows, gaps = [], [], []
    for i, segment in enumerate(segments):
        if use_packed[i]:
            tags.append(bytes([PACKED]))
            rows.append(packed[i])
        else:
            tags.append(bytes([int(k[i]) | (COMPLEMENT if complement[i] else 0)]) + varint(int(counts[i])))
            gaps.append(np.diff(np.flatnonzero(segment != complement[i]), prepend=-1) - 1)
    out = b"".join(tags)
    if rows:
        stream = deflate_segments(np.concatenate(rows), np.array([row.size for row in rows]))
        out += varint(len(stream)) + stream
    if gaps:
        riced = ~use_packed
        unary, remainders = rice_encode(np.concatenate(gaps), np.repeat(k[riced], counts[riced]))
        out += unary + remainders
    return out


def decode_bitmap(reader: Reader, sizes: Ints) -> Bools:
    """The inverse of `encode_bitmap`; every count is checked before anything of its size is made."""
    sizes = sizes[sizes > 0]
    k = np.zeros(sizes.size, np.uint8)
    counts = np.zeros(sizes.size, np.int64)
    flags = np.zeros((2, sizes.size), np.bool_)
    packed, complement = flags
    for i, size in enumerate(sizes.tolist()):
        at = reader.at
        tag = reader.byte("mask tag")
        if tag == PACKED:
            packed[i] = True
            continue
        k[i] = tag & ~COMPLEMENT
        if k[i] > MAX_RICE:
            raise WireError(f"mask tag must be {PACKED} or a Rice parameter up to {MAX_RICE}, got {tag}", at)
        complement[i] = bool(tag & COMPLEMENT)
        counts[i] = reader.varint("mask count", size)
    bits = np.zeros(int(sizes.sum()), np.bool_)
    starts = np.cumsum(sizes) - sizes
    if packed.any():
        _read_packed(reader, bits, starts[packed], sizes[packed])
    if counts.any():
        _read_rice(reader, bits, starts, sizes, counts, k)
    if complement.any():
        bits ^= np.repeat(complement, sizes)
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


def _packed_is_shorter(packed: list[Bytes8], sizes: Ints, rice_bits: npt.NDArray[np.float64]) -> Bools:
    best = sizes.astype(np.float64)
    if sizes.sum() > SHORT:
        rows = histograms(np.concatenate(packed), (sizes + 7) >> 3)
        overall = rows.sum(axis=0)
        shared = rows @ code_lengths(overall) + table_bits(overall) * sizes / sizes.sum()
        own = np.array([block_bits(row) for row in rows])
        best = np.minimum(np.minimum(shared, own), best)
    # Packed bits decode several times faster, so that Rice codes must save at least a hundredth.
    return np.asarray(0.99 * best < rice_bits + 16)


def _read_packed(reader: Reader, bits: Bools, starts: Ints, sizes: Ints) -> None:
    expected = int(((sizes + 7) >> 3).sum())
    length = reader.varint("mask bits length", 2 * expected + 64)
    at = reader.at
    data = inflate(reader.take(length, "mask bits"), expected, at)
    byte = 0
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        piece = data[byte : byte + ((size + 7) >> 3)]
        if size & 7 and piece[-1] >> (size & 7):
            raise WireError("mask bits beyond the end of a segment must be 0", at)
        bits[start : start + size] = as_bools(piece, size)
        byte += len(piece)


def _read_rice(reader: Reader, bits: Bools, starts: Ints, sizes: Ints, counts: Ints, k: Bytes8) -> None:
    total = int(counts.sum())
    wide = k.astype(np.int64)
    longest = total + int((sizes >> wide)[counts > 0].sum())
    quotients = read_unary(reader, total, longest, "mask unary part")
    widths = np.repeat(k, counts)
    at = reader.at
    remainders = unpack_fields(
        reader.take(field_bytes(int((counts * wide).sum())), "mask remainders"), total, widths
    )
    steps = (quotients << widths.astype(np.int64)) + remainders + 1
    places = np.cumsum(steps)
    ends = np.cumsum(counts)
    before = np.concatenate([[0], places])[ends - counts]
    places += np.repeat(starts - before, counts) - 1
    used = counts > 0
    if (places[ends[used] - 1] >= (starts + sizes)[used]).any():
        raise WireError("mask gaps run beyond the end of their segment", at)
    bits[places] = True
