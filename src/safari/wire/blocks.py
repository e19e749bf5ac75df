"""Blocks with a Huffman table each: neighbouring segments are joined while that saves bits."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from safari.wire.bits import Bytes8, deflate
from safari.wire.layout import Ints

Counts = npt.NDArray[np.float64]

# What a deflate block spends on its code lengths: a start, and so much for every symbol in use.
TABLE_BITS = 60.0
TABLE_BITS_PER_SYMBOL = 3.0
# Below this many symbols a table of one's own never pays; such segments always join their neighbours.
MIN_BLOCK = 1024


def histograms(symbols: Bytes8, sizes: Ints) -> Counts:
    """Count each of the 256 symbols in each segment."""
    rows = np.repeat(np.arange(sizes.size, dtype=np.int64) << 8, sizes)
    return np.bincount(rows + symbols, minlength=sizes.size << 8).reshape(-1, 256).astype(np.float64)


def table_bits(counts: Counts) -> float:
    """About how many bits the code table of a block takes."""
    return TABLE_BITS + TABLE_BITS_PER_SYMBOL * int(np.count_nonzero(counts))


def blocks_bits(rows: Counts) -> Counts:
    """`block_bits` of many histograms at once."""
    totals, tops = rows.sum(axis=1), rows.max(axis=1)
    logs = np.log2(np.maximum(rows, 1.0))
    spreads = np.einsum("ij,ij->i", rows, logs)
    rest = totals - tops
    plain = totals * np.log2(np.maximum(totals, 1.0)) - spreads
    heavy = totals + rest * np.log2(np.maximum(rest, 1.0)) - (spreads - tops * logs.max(axis=1))
    tables = TABLE_BITS + TABLE_BITS_PER_SYMBOL * np.count_nonzero(rows, axis=1)
    return np.asarray(np.where(2 * tops > totals, heavy, plain) + tables)


def block_bits(counts: Counts) -> float:
    """About how many bits a block takes, its table included.

    That is the entropy, but for a symbol that fills more than half of the block: it costs a whole bit, and
    so does every other symbol on top of what it costs among its own.
    """
    total, top = float(counts.sum()), float(counts.max())
    spread = float(counts @ np.log2(np.maximum(counts, 1.0)))
    bits = total * math.log2(total) - spread if total else 0.0
    if 2 * top > total:
        rest = total - top
        bits = total + (rest * math.log2(rest) if rest else 0.0) - (spread - top * math.log2(top))
    return bits + table_bits(counts)


def code_lengths(counts: Counts) -> npt.NDArray[np.float64]:
    """About how many bits a Huffman code made for `counts` spends on each symbol."""
    top = int(counts.argmax())
    heavy = 2 * counts[top] > counts.sum()
    rest = counts.sum() - (counts[top] if heavy else 0)
    lengths = np.asarray(np.log2(np.maximum(rest, 1)) - np.log2(np.maximum(counts, 1)) + float(heavy))
    if heavy:
        lengths[top] = 1.0
    return lengths


def joined(sizes: Ints, least: int) -> Ints:
    """Sizes of neighbours added up until each reaches `least` (the last may fall short).

    >>> joined(np.array([5, 1, 1, 9, 2]), 4).tolist()
    [5, 11, 2]
    """
    out: list[int] = []
    running = 0
    for size in sizes.tolist():
        running += size
        if running >= least:
            out.append(running)
            running = 0
    return np.array([*out, running] if running else out, np.int64)


def deflate_segments(symbols: Bytes8, sizes: Ints) -> bytes:
    """Raw deflate of segments that may differ in statistics; they share tables where that is shorter."""
    sizes = joined(sizes, MIN_BLOCK)
    if sizes.size < 2:
        return deflate([symbols])
    rows = histograms(symbols, sizes)
    cuts = []
    each = blocks_bits(rows).tolist()
    current, cost = rows[0], each[0]
    for i in range(1, sizes.size):
        both, alone = current + rows[i], each[i]
        together = block_bits(both)
        if together <= cost + alone:
            current, cost = both, together
        else:
            cuts.append(int(sizes[:i].sum()))
            current, cost = rows[i], alone
    return deflate(np.split(symbols, cuts))
