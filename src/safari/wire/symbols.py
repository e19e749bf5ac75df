"""Numbers as symbols and raw bits, and a row of symbols as bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from safari.errors import WireError
from safari.wire.bits import (
    Bytes8,
    Fields,
    Reader,
    Words,
    field_bytes,
    inflate,
    pack_fields,
    read_unary,
    rice_encode,
    unpack_fields,
    varint,
)
from safari.wire.blocks import deflate_segments
from safari.wire.huffman import (
    ABSENT,
    Code,
    check_rows,
    decode_rows,
    encode_rows,
    levels_of,
    listed_code,
    paired_code,
)
from safari.wire.layout import Ints

DEFLATED = 0
LISTED = 1
PAIRED = 2
RICED = 8
MAX_RICE = 7
# Above this many symbols a Huffman table is cheap, and Rice codes are not tried.
SHORT = 4096

NIBBLES = 4


@dataclass(frozen=True)
class Alphabet:
    """Symbol `s` with a field `f` of `width[s]` bits stands for the number `base[s] + f`."""

    base: npt.NDArray[np.uint64]
    width: Bytes8


@cache
def alphabet(code: int) -> Alphabet:
    """Codes 0 to 3: bit length and that many bits after the leading one; code 4: sixteen symbols.

    >>> alphabet(1).base[:8].tolist(), alphabet(1).width[:8].tolist()
    ([0, 1, 2, 3, 4, 6, 8, 12], [0, 0, 0, 0, 1, 1, 2, 2])
    """
    if code == NIBBLES:
        base = [*range(12), 12, 28, 284, 65820]
        width = [0] * 12 + [4, 8, 16, 32]
    else:
        shifts = range(32 - code)
        base = [*range(1 << code), *(((1 << code) + i) << n for n in shifts for i in range(1 << code))]
        width = [0] * (1 << code) + [n for n in shifts for _ in range(1 << code)]
    return Alphabet(np.array(base, np.uint64), np.array(width, np.uint8))


def to_symbols(numbers: Words, code: int) -> tuple[Bytes8, Words, Bytes8]:
    """Symbols, fields and their widths for unsigned numbers."""
    symbols = symbols_of(numbers, code)
    return symbols, *fields_of(numbers, symbols, code)


def symbols_of(numbers: Words, code: int) -> Bytes8:
    """The symbols of unsigned numbers."""
    if code == NIBBLES:
        symbols = _small_nibbles().take(np.minimum(numbers, 284))
        symbols[numbers >= 65820] = 15
        return symbols
    # The exponent of a float is the bit length, and the bits after the leading one follow it.
    top = (numbers.astype(np.float64).view(np.uint64) >> np.uint64(52 - code)).astype(np.uint32)
    return np.where(numbers >> code, top - np.uint32((1022 + code) << code), numbers).astype(np.uint8)


def fields_of(numbers: Words, symbols: Bytes8, code: int) -> tuple[Words, Bytes8]:
    """Bits of the numbers that their symbols leave open, and the widths of these fields."""
    table = alphabet(code)
    return numbers - table.base.astype(np.uint32).take(symbols), table.width.take(symbols)


@cache
def _small_nibbles() -> Bytes8:
    return (np.searchsorted(alphabet(NIBBLES).base, np.arange(285), side="right") - 1).astype(np.uint8)


def zigzag(numbers: npt.NDArray[np.int32]) -> Words:
    """0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    return ((numbers << 1) ^ (numbers >> 31)).view(np.uint32)


def unzigzag(numbers: Words) -> npt.NDArray[np.int32]:
    """The inverse of `zigzag`."""
    return ((numbers >> np.uint32(1)) ^ (~(numbers & np.uint32(1)) + np.uint32(1))).view(np.int32)


def chained(numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Each number negated where the last one before it that is not 0 is negative: neighbours tend to move
    the same way, and the sign then says whether they did.

    >>> chained(np.array([-3, 0, -2, 5, 1], np.int32)).tolist()
    [-3, 0, 2, -5, 1]
    """
    out = numbers.copy()
    places = np.flatnonzero(numbers)
    moved = numbers.take(places)
    out[places[1:]] = np.where(moved[:-1] < 0, -moved[1:], moved[1:])
    return out


def unchained(numbers: npt.NDArray[np.int32], negative: bool = False) -> Ints:
    """The inverse of `chained`; `negative`: whether the last number before these that is not 0 is.

    >>> unchained(np.array([-3, 0, 2, -5, 1], np.int32)).tolist()
    [-3, 0, -2, 5, 1]
    >>> unchained(np.array([-(2**31)], np.int32), negative=True).tolist()
    [2147483648]
    """
    odd = np.cumsum(numbers < 0) + negative & 1
    # In 64 bits, because -2^31 has no opposite in 32.
    sizes = np.abs(numbers.astype(np.int64))
    return np.where(odd == 1, -sizes, sizes)


def pair(symbols: Bytes8) -> Bytes8:
    """Two symbols below 16 in a byte, the first in the low half; a missing last one is 0."""
    even = np.append(symbols, np.uint8(0)) if symbols.size & 1 else symbols
    return even[0::2] | (even[1::2] << np.uint8(4))


def unpair(data: Bytes8, count: int) -> Bytes8:
    """The inverse of `pair`."""
    out = np.empty(data.size * 2, np.uint8)
    out[0::2] = data & 15
    out[1::2] = data >> 4
    return out[:count]


@dataclass(frozen=True)
class Way:
    """A way to write a row of symbols, and how many bytes it takes: known before they are written."""

    size: int
    write: Callable[[Bytes8], bytes]


def plan_symbols(symbols: Bytes8, sizes: Ints, paired: bool = False) -> Way:
    """The shortest way for bytes in segments of those sizes; short rows also try codes that need no table or
    a small one.

    `paired`: each byte holds two symbols.
    """
    if not symbols.size:
        return Way(0, lambda _: b"")
    stream = deflate_segments(symbols, sizes)
    out = bytes([DEFLATED]) + varint(len(stream)) + stream
    ways = [Way(len(out), lambda _: out)]
    if symbols.size <= SHORT:
        counts = np.bincount(symbols, minlength=256)
        ways += [_rice(counts), _paired(symbols, counts) if paired else _listed(counts)]
    return min(ways, key=lambda way: way.size)


def encode_symbols(symbols: Bytes8, sizes: Ints) -> bytes:
    """Bytes in segments of those sizes, the shortest way."""
    return plan_symbols(symbols, sizes).write(symbols)


def _listed(counts: Ints) -> Way:
    used = np.flatnonzero(counts)
    first, end = int(used[0]), int(used[-1]) + 1
    levels = levels_of(counts[first:end])
    head = bytes([LISTED, first, len(levels) - 1]) + pack_fields(np.array(levels, np.uint32), 4)
    return _under(head, listed_code(first, levels), counts)


def _paired(symbols: Bytes8, counts: Ints) -> Way:
    halves = np.bincount(symbols & 15, minlength=16) + np.bincount(symbols >> 4, minlength=16)
    levels = levels_of(halves)
    head = bytes([PAIRED]) + pack_fields(np.array(levels, np.uint32), 4)
    return _under(head, paired_code(levels), counts)


def _under(head: bytes, code: Code, counts: Ints) -> Way:
    size = len(head) + field_bytes(code.bits(counts))
    return Way(size, lambda symbols: head + encode_rows([symbols], [code]))


def _rice(counts: Ints) -> Way:
    total = int(counts.sum())
    middle = int(np.searchsorted(np.cumsum(counts), total >> 1))
    centres = np.arange(max(middle - 2, 0), min(middle + 3, 256))
    quotients = _quotients()[:, centres] @ counts
    costs = quotients + np.arange(MAX_RICE + 1)[:, None] * total
    k, nearest = divmod(int(costs.argmin()), centres.size)
    centre = int(centres[nearest])

    def write(symbols: Bytes8) -> bytes:
        unary, remainders = rice_encode(_fold(symbols, centre).astype(np.int64), k)
        return bytes([RICED + k, centre]) + unary + remainders

    return Way(2 + field_bytes(int(quotients[k, nearest]) + total) + field_bytes(k * total), write)


@cache
def _quotients() -> Ints:
    """The Rice quotient by parameter, centre and symbol."""
    everything = np.arange(256, dtype=np.uint8)
    folded = np.stack([_fold(everything, centre) for centre in range(256)]).astype(np.int64)
    return folded >> np.arange(MAX_RICE + 1)[:, None, None]


def _fold(symbols: Bytes8, centre: int) -> Bytes8:
    away = (symbols - np.uint8(centre)).view(np.int8)
    return ((away << 1) ^ (away >> 7)).view(np.uint8)


def decode_symbols(reader: Reader, count: int) -> Bytes8:
    """The inverse of `encode_symbols`."""
    if not count:
        return np.empty(0, np.uint8)
    at = reader.at
    coder = reader.byte("symbol coder")
    if coder == DEFLATED:
        length = reader.varint("symbols length", 2 * count + 64)
        at = reader.at
        return np.frombuffer(inflate(reader.take(length, "symbols"), count, at), np.uint8)
    if coder == LISTED:
        first, more = reader.take(2, "table head")
        if first + more > 255:
            raise WireError(f"table must end at symbol 255, got {first + more}", at)
        levels = _read_levels(reader, more + 1)
        return decode_rows(reader, [count], [listed_code(first, levels)], "symbols")[0]
    if coder == PAIRED:
        return decode_rows(reader, [count], [paired_code(_read_levels(reader, 16))], "symbols")[0]
    return _read_riced(reader, count, coder, at)


def _read_riced(reader: Reader, count: int, coder: int, at: int) -> Bytes8:
    if not RICED <= coder <= RICED + MAX_RICE:
        known = f"{DEFLATED} to {PAIRED} or {RICED} to {RICED + MAX_RICE}"
        raise WireError(f"symbol coder must be {known}, got {coder}", at)
    check_rows([count], "symbols", at)
    k = coder - RICED
    centre = reader.byte("symbol centre")
    unary = read_unary(reader, count, count * (1 + (255 >> k)), "symbols unary part")
    remainders = Fields(reader.take(field_bytes(count * k), "symbols remainders"), at, "symbols remainders")
    out = np.empty(count, np.uint8)
    done = 0
    for quotients in unary:
        folded = (quotients << k) + remainders.take(quotients.size, k)
        if (folded > 255).any():
            raise WireError(f"symbols must be at most 255 away, got {int(folded.max())}", at)
        away = folded.astype(np.uint8)
        out[done : done + away.size] = (away >> np.uint8(1)) ^ (~(away & np.uint8(1)) + np.uint8(1))
        done += away.size
    return out + np.uint8(centre)


def _read_levels(reader: Reader, count: int) -> tuple[int, ...]:
    at = reader.at
    levels = tuple(unpack_fields(reader.take(field_bytes(4 * count), "table"), count, 4).tolist())
    if min(levels) == ABSENT:
        raise WireError("table must hold a symbol", at)
    return levels


def write_fields(fields: Words, widths: Bytes8 | int) -> bytes:
    """Raw bits: fields one after another, those of width 0 left out."""
    if isinstance(widths, int):
        return pack_fields(fields, widths)
    some = widths > 0
    return pack_fields(fields[some], widths[some])
