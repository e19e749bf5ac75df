"""Numbers as symbols and raw bits, and a row of symbols as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from safari.errors import WireError
from safari.wire.bits import (
    Bytes8,
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
from safari.wire.layout import Ints

DEFLATED = 0
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
    table = alphabet(code)
    if code == NIBBLES:
        symbols = _small_nibbles().take(np.minimum(numbers, 284))
        symbols[numbers >= 65820] = 15
    else:
        length = np.frexp(numbers.astype(np.float64))[1].astype(np.int64)
        shift = np.maximum(length - 1 - code, 0)
        symbols = ((shift << code) + (numbers.astype(np.int64) >> shift)).astype(np.uint8)
    fields = (numbers - table.base.astype(np.uint32).take(symbols)).astype(np.uint32)
    return symbols, fields, table.width.take(symbols)


@cache
def _small_nibbles() -> Bytes8:
    return (np.searchsorted(alphabet(NIBBLES).base, np.arange(285), side="right") - 1).astype(np.uint8)


def zigzag(numbers: npt.NDArray[np.int32]) -> Words:
    """0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    return ((numbers << 1) ^ (numbers >> 31)).view(np.uint32)


def unzigzag(numbers: Words) -> npt.NDArray[np.int32]:
    """The inverse of `zigzag`."""
    return ((numbers >> np.uint32(1)) ^ (~(numbers & np.uint32(1)) + np.uint32(1))).view(np.int32)


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


def encode_symbols(symbols: Bytes8, sizes: Ints) -> bytes:
    """Bytes in segments of those sizes; short rows also try Rice codes, which need no table."""
    if not symbols.size:
        return b""
    stream = deflate_segments(symbols, sizes)
    out = bytes([DEFLATED]) + varint(len(stream)) + stream
    return min(out, _rice(symbols), key=len) if symbols.size <= SHORT else out


def _rice(symbols: Bytes8) -> bytes:
    counts = np.bincount(symbols, minlength=256)
    middle = int(np.searchsorted(np.cumsum(counts), symbols.size >> 1))
    centres = np.arange(max(middle - 2, 0), min(middle + 3, 256))
    costs = _quotients()[:, centres] @ counts + np.arange(MAX_RICE + 1)[:, None] * symbols.size
    k, nearest = divmod(int(costs.argmin()), centres.size)
    centre = int(centres[nearest])
    unary, remainders = rice_encode(_fold(symbols, centre).astype(np.int64), k)
    return bytes([RICED + k, centre]) + unary + remainders


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
    if not RICED <= coder <= RICED + MAX_RICE:
        raise WireError(f"symbol coder must be {DEFLATED} or {RICED} to {RICED + MAX_RICE}, got {coder}", at)
    k = coder - RICED
    centre = reader.byte("symbol centre")
    quotients = read_unary(reader, count, count * (1 + (255 >> k)), "symbols unary part")
    remainders = unpack_fields(reader.take(field_bytes(count * k), "symbols remainders"), count, k)
    folded = (quotients << k) + remainders
    if (folded > 255).any():
        raise WireError(f"symbols must be at most 255 away, got {int(folded.max())}", at)
    away = folded.astype(np.uint8)
    away = (away >> np.uint8(1)) ^ (~(away & np.uint8(1)) + np.uint8(1))
    return away + np.uint8(centre)


def read_fields(reader: Reader, widths: Bytes8 | int, count: int) -> Words:
    """The raw bits that follow the symbols, to the end of the data and not beyond."""
    bits = widths * count if isinstance(widths, int) else int(widths.sum(dtype=np.int64))
    size = field_bytes(bits)
    if reader.left != size:
        raise WireError(f"raw bits must take the last {size} bytes, {reader.left} are left", reader.at)
    return unpack_fields(reader.take(size, "raw bits"), count, widths)


def write_fields(fields: Words, widths: Bytes8 | int) -> bytes:
    """The inverse of `read_fields`."""
    return pack_fields(fields, widths)
