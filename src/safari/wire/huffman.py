"""Short rows of bytes under Huffman codes that follow from a few numbers, so that no code table travels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from safari.errors import WireError
from safari.wire.bits import ONES, Bytes8, Reader, Words, field_bytes, pack_fields

LONGEST = 15
# Such rows are for packets; a decoder, which takes one word after another, need not read long ones.
MOST_BYTES = 1 << 15
# How many words are looked up at once, and how many tables of 64 kB are kept to look them up in.
WORDS_AT_ONCE = 1024
TABLES = 8
# Weights a table can state, by the four bits that state them; the last is a symbol that does not occur.
LEVELS = (65536, 46341, 32768, 23170, 16384, 11585, 8192, 5793, 4096, 2896, 1448, 724, 362, 181, 64, 0)
ABSENT = 15


@dataclass(frozen=True, eq=False)
class Code:
    """For each of 256 bytes the length of its code word (0: it has none), and the word, first bit lowest."""

    lengths: Bytes8
    words: Words

    def bits(self, counts: npt.NDArray[np.integer]) -> int:
        """Length in bits of a row with these counts of bytes; each byte that occurs must have a word."""
        return int(counts @ self.lengths.astype(np.int64))


def code_of(weights: Sequence[int]) -> Code:
    """The canonical Huffman code of 256 weights, none of its words longer than 15 bits.

    >>> code_of([5, 1, 1, 0, 2] + [0] * 251).lengths[:5].tolist()
    [1, 3, 3, 0, 2]
    """
    used = [s for s, weight in enumerate(weights) if weight]
    floor = max(1, sum(weights) >> LONGEST)
    while max(lengths := word_lengths([max(weights[s], floor) for s in used])) > LONGEST:
        floor *= 2
    length, symbol = np.array(sorted(zip(lengths, used, strict=True))).T
    # Left-aligned, each word is the one before plus what that one takes of all strings of bits.
    shares = 1 << (LONGEST - length)
    left = np.cumsum(shares) - shares
    out, words = np.zeros(256, np.uint8), np.zeros(256, np.uint32)
    out[symbol], words[symbol] = length, _reversed(LONGEST).take(left)
    return Code(out, words)


def word_lengths(weights: Sequence[float]) -> list[int]:
    """Depths in the tree that joins the two lightest nodes again and again; of equals, the earlier made.

    Joined nodes never get lighter, so that two queues do: the leaves by weight, and the joined ones as made.
    """
    count = len(weights)
    if count == 1:
        return [1]
    leaves = sorted(range(count), key=weights.__getitem__)
    by_weight = [weights[leaf] for leaf in leaves] + [math.inf]
    joined: list[float] = []
    parents = [0] * (2 * count - 1)
    leaf = node = 0
    for number in range(count, 2 * count - 1):
        total: float = 0
        for _ in range(2):
            # A leaf was there before any joined node.
            if node == len(joined) or by_weight[leaf] <= joined[node]:
                total += by_weight[leaf]
                parents[leaves[leaf]] = number
                leaf += 1
            else:
                total += joined[node]
                parents[count + node] = number
                node += 1
        joined.append(total)
    depths = [0] * len(parents)
    for number in range(len(parents) - 2, -1, -1):
        depths[number] = depths[parents[number]] + 1
    return depths[:count]


@lru_cache(128)
def sparse_code(density: int, blanks: int) -> Code:
    """The code for eight mask bits at a time: a byte is 0 in `blanks` of 64 cases; otherwise each of its
    bits is set in `density` of 128."""
    by_count = [(64 - blanks) * density**k * (128 - density) ** (8 - k) for k in range(9)]
    weights = [by_count[ones] for ones in ONES.tolist()]
    weights[0] += blanks << 56
    return code_of(weights)


@lru_cache(64)
def listed_code(first: int, levels: tuple[int, ...]) -> Code:
    """The code of symbols from `first` on that have these levels."""
    weights = [0] * 256
    weights[first : first + len(levels)] = [LEVELS[level] for level in levels]
    return code_of(weights)


@lru_cache(64)
def paired_code(levels: tuple[int, ...]) -> Code:
    """The code of bytes whose two halves are independent and have these 16 levels."""
    w = [LEVELS[level] for level in levels]
    return code_of([w[byte & 15] * w[byte >> 4] for byte in range(256)])


def levels_of(counts: npt.NDArray[np.integer]) -> tuple[int, ...]:
    """The level of each symbol that fits how often it occurs best.

    >>> levels_of(np.array([100, 50, 0, 1]))
    (0, 2, 15, 11)
    """
    seen = np.maximum(counts, 1e-9)
    logs = np.log2(np.array(LEVELS[:ABSENT]))
    away = np.abs(logs[:, None] - logs[0] - np.log2(seen / seen.max()))
    return tuple(np.where(counts > 0, away.argmin(axis=0), ABSENT).tolist())


def encode_rows(rows: Sequence[Bytes8], codes: Sequence[Code]) -> bytes:
    """Rows one after another, each under its own code, padded to a whole byte."""
    words = np.concatenate([code.words.take(row) for row, code in zip(rows, codes, strict=True)])
    widths = np.concatenate([code.lengths.take(row) for row, code in zip(rows, codes, strict=True)])
    return pack_fields(words, widths)


def check_rows(sizes: Sequence[int], what: str, at: int) -> None:
    """Raise where rows are too long to be read a word at a time."""
    total = sum(sizes)
    if total > MOST_BYTES:
        raise WireError(f"{what} must be at most {MOST_BYTES} bytes under such a code, got {total}", at)


def decode_rows(reader: Reader, sizes: Sequence[int], codes: Iterable[Code], what: str) -> list[Bytes8]:
    """The inverse of `encode_rows`; each code is taken from `codes` when its row is due."""
    at, total = reader.at, sum(sizes)
    check_rows(sizes, what, at)
    window = reader.data[at : at + field_bytes(LONGEST * total)]
    bit = 0
    rows = []
    for size, code in zip(sizes, codes, strict=True):
        row = np.empty(size, np.uint8)
        symbols, steps = _table(code.lengths.tobytes())
        longest = symbols.size.bit_length() - 1
        for first in range(0, size, WORDS_AT_ONCE):
            count = min(WORDS_AT_ONCE, size - first)
            near = _ahead(window, bit, longest * count, symbols.size - 1)
            places = _follow(steps.take(near).tolist(), count)
            if places is None or bit + places[-1] > 8 * len(window):
                raise WireError(f"{what} must hold {total} code words", at)
            row[first : first + count] = symbols.take(near.take(places[:-1]))
            bit += places[-1]
        rows.append(row)
    used = field_bytes(bit)
    if bit & 7 and window[used - 1] >> (bit & 7):
        raise WireError(f"{what} must end in 0 bits", at + used - 1)
    reader.take(used, what)
    return rows


def _follow(steps: list[int], size: int) -> list[int] | None:
    """Start of each of `size` words and the end of the last one; None where bits begin no word or run out.

    `steps`: for each bit how long the word is that begins there, 0 where none does.
    """
    places = []
    place = 0
    try:
        for _ in range(size):
            places.append(place)
            place += steps[place]
    except IndexError:
        return None
    # Where no word begins the walk stands still, to its end.
    if size and places[-1] == place:
        return None
    places.append(place)
    return places


def _ahead(window: memoryview, bit: int, count: int, most: int) -> npt.NDArray[np.int32]:
    """For each of up to `count` bits from `bit` on, the number that it and those after it make, as many as
    `most` has, with 0 bits after the end."""
    first, end = bit >> 3, field_bytes(bit + count)
    padded = np.frombuffer(bytes(window[first : end + 2]) + bytes(2), np.uint8).astype(np.int32)
    three = padded[:-2] | padded[1:-1] << 8 | padded[2:] << 16
    numbers = (three[:, None] >> np.arange(8, dtype=np.int32)) & most
    return numbers.reshape(-1)[bit & 7 : (bit & 7) + count]


@lru_cache(TABLES)
def _table(lengths: bytes) -> tuple[Bytes8, Bytes8]:
    """For each string of bits as long as the longest word, the symbol whose word it begins with and how long
    that is; 0 where none does."""
    found = np.frombuffer(lengths, np.uint8)
    longest = int(found.max())
    used = np.flatnonzero(found)
    order = used[np.argsort(found[used], kind="stable")]
    # In the order of the words read from their first bit, each word fills a run.
    runs = 1 << (longest - found[order].astype(np.int64))
    symbols, steps = np.zeros((2, 1 << longest), np.uint8)
    symbols[: runs.sum()] = np.repeat(order.astype(np.uint8), runs)
    steps[: runs.sum()] = np.repeat(found[order], runs)
    return symbols.take(_reversed(longest)), steps.take(_reversed(longest))


@cache
def _reversed(length: int) -> npt.NDArray[np.int32]:
    """Every number of this many bits, with its bits reversed."""
    numbers = np.arange(1 << length, dtype=np.int32)
    return sum((((numbers >> bit) & 1) << (length - 1 - bit) for bit in range(length)), start=0 * numbers)
