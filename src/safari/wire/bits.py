"""The small parts of the format: bit fields, Rice codes, deflate with bounds, and a careful reader.

A decoder works through at most about `CHUNK` numbers at a time: what it needs beside its result then does not
grow with the message, whatever the message says.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from safari.errors import SafariError, WireError
from safari.wire.layout import Ints

Bytes8 = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]

# How many numbers are decoded at a time: enough to hide the cost of a call into numpy.
CHUNK = 1 << 14
# How many set bits each byte has.
ONES = np.array([byte.bit_count() for byte in range(256)], np.uint8)


class Reader:
    """A position in received bytes; every read is checked against their end."""

    def __init__(self, data: bytes):
        if not isinstance(data, bytes | bytearray | memoryview):
            raise SafariError(f"data must be bytes, got {type(data).__name__}")
        self.data = memoryview(data)
        self.at = 0

    @property
    def left(self) -> int:
        """Number of bytes that remain."""
        return len(self.data) - self.at

    def take(self, size: int, what: str) -> memoryview:
        """The next `size` bytes."""
        if size > self.left:
            raise WireError(f"{what} needs {size} bytes, {self.left} are left", self.at)
        piece = self.data[self.at : self.at + size]
        self.at += size
        return piece

    def byte(self, what: str) -> int:
        """The next byte."""
        return self.take(1, what)[0]

    def varint(self, what: str, limit: int) -> int:
        """The next variable-length number, at most `limit`."""
        start = self.at
        number = 0
        for shift in range(0, 35, 7):
            byte = self.byte(what)
            number |= (byte & 127) << shift
            if byte < 128:
                break
        else:
            raise WireError(f"{what} is longer than 5 bytes", start)
        if number > limit:
            raise WireError(f"{what} must be at most {limit}, got {number}", start)
        return number


def field_bytes(total_bits: int) -> int:
    """Number of bytes that hold that many bits."""
    return (total_bits + 7) >> 3


def pack_fields(values: Words, widths: Bytes8 | int) -> bytes:
    """Fields of 0 to 32 bits one after another, the least significant bit first, padded with zeros.

    >>> pack_fields(np.array([1, 2, 3], np.uint32), 4).hex()
    '2103'
    """
    if isinstance(widths, int):
        if widths in (0, 8, 16, 24, 32):
            planes = values.astype("<u4", copy=False).view(np.uint8).reshape(-1, 4)
            return planes[:, : widths >> 3].tobytes()
        widths = np.full(values.size, widths, np.uint8)
    if not values.size:
        return b""
    wide, widths = _in_fours(values, widths)
    ends = np.cumsum(widths, dtype=np.int64)
    starts = ends - widths
    word = starts >> 6
    shift = (starts & 63).astype(np.uint64)
    # No two fields share a bit, so that adding what falls into one word is the same as or-ing it.
    firsts = np.concatenate([[0], np.flatnonzero(word[1:] != word[:-1]) + 1])
    words = np.zeros(int(word[-1]) + 2, "<u8")
    words[word[firsts]] = np.add.reduceat(wide << shift, firsts)
    words[word[firsts] + 1] += np.add.reduceat((wide >> np.uint64(1)) >> (np.uint64(63) - shift), firsts)
    return words.tobytes()[: field_bytes(int(ends[-1]))]


def _in_fours(values: Words, widths: Bytes8) -> tuple[npt.NDArray[np.uint64], Bytes8]:
    """Merge fields into fewer, wider ones of the same bits: four to one if that makes at most 32 bits."""
    if 4 * int(widths.max()) > 32 or values.size < 4:
        return values.astype(np.uint64), widths
    for _ in range(2):
        if values.size & 1:
            values, widths = np.append(values, np.uint32(0)), np.append(widths, np.uint8(0))
        values = values[::2] | values[1::2] << widths[::2]
        widths = widths[::2] + widths[1::2]
    return values.astype(np.uint64), widths


def unpack_fields(data: bytes | memoryview, count: int, widths: Bytes8 | int, skip: int = 0) -> Words:
    """The inverse of `pack_fields`; the caller has checked that `data` is long enough.

    `skip`: how many bits, at most 7, come before the first field.

    >>> unpack_fields(bytes.fromhex("2103"), 3, 4).tolist()
    [1, 2, 3]
    >>> unpack_fields(bytes.fromhex("2103"), 2, 4, skip=4).tolist()
    [2, 3]
    """
    if isinstance(widths, int):
        if not skip and widths in (0, 8, 16, 24, 32):
            planes = np.zeros((count, 4), np.uint8)
            size = widths >> 3
            planes[:, :size] = np.frombuffer(data, np.uint8, count * size).reshape(count, size)
            return planes.reshape(-1).view("<u4").astype(np.uint32, copy=False)
        widths = np.full(count, widths, np.uint8)
    ends = np.cumsum(widths, dtype=np.int64)
    ends += skip
    starts = ends - widths
    words = np.frombuffer(bytes(data) + bytes(24 - len(data) % 8), "<u8")
    word = starts >> 6
    shift = (starts & 63).astype(np.uint64)
    low = words.take(word) >> shift
    high = (words.take(word + 1) << np.uint64(1)) << (np.uint64(63) - shift)
    keep = (np.uint64(1) << widths.astype(np.uint64)) - np.uint64(1)
    return ((low | high) & keep).astype(np.uint32)


class Fields:
    """Bit fields that are read a few at a time from bytes that hold nothing else."""

    def __init__(self, data: memoryview, offset: int, what: str):
        self._data, self._offset, self._what = data, offset, what
        self._bit = 0

    def take(self, count: int, widths: Bytes8 | int) -> Words:
        """The next `count` fields."""
        bits = widths * count if isinstance(widths, int) else int(widths.sum(dtype=np.int64))
        first, end = self._bit >> 3, field_bytes(self._bit + bits)
        if end > len(self._data):
            raise WireError(f"{self._what} need at least {end} bytes, got {len(self._data)}", self._offset)
        skip, self._bit = self._bit & 7, self._bit + bits
        return unpack_fields(self._data[first:end], count, widths, skip)

    def finish(self) -> None:
        """Raise unless every byte has been read."""
        self.check(self._bit)

    def check(self, bits: int) -> None:
        """Raise unless there are exactly as many bytes as it takes to hold this many bits."""
        size = field_bytes(bits)
        if len(self._data) != size:
            problem = f"{self._what} must take the last {size} bytes, {len(self._data)} are left"
            raise WireError(problem, self._offset)


def rice_encode(numbers: Ints, k: npt.NDArray[np.uint8] | int) -> tuple[bytes, bytes]:
    """Quotients by 2^k in unary (that many 0 bits, then a 1) and remainders of k bits, as two strings.

    >>> [part.hex() for part in rice_encode(np.array([0, 5, 2]), 1)]
    ['29', '02']
    """
    if not numbers.size:
        return b"", b""
    shifts = k if isinstance(k, int) else k.astype(np.int64)
    quotients = numbers >> shifts
    ends = np.cumsum(quotients + 1)
    bits = np.zeros(int(ends[-1]), np.bool_)
    bits[ends - 1] = True
    remainders = (numbers - (quotients << shifts)).astype(np.uint32)
    return np.packbits(bits, bitorder="little").tobytes(), pack_fields(remainders, k)


def read_unary(reader: Reader, count: int, longest: int, what: str) -> Iterator[Ints]:
    """`count` unary numbers that take at most `longest` bits, a few at a time.

    Their end is found at once, so that the reader stands at the next byte before the first number is used.
    """
    at = reader.at
    window = reader.data[at : at + field_bytes(longest)]
    size = _unary_bytes(window, count, what, at)
    return _unary(reader.take(size, what))


def _unary_bytes(window: memoryview, count: int, what: str, at: int) -> int:
    """Number of bytes until `count` bits have been set."""
    if not count:
        return 0
    seen = 0
    for first in range(0, len(window), CHUNK):
        ones = ONES.take(np.frombuffer(window[first : first + CHUNK], np.uint8))
        here = int(ones.sum(dtype=np.int64))
        if seen + here >= count:
            last = int(np.searchsorted(np.cumsum(ones, dtype=np.int64), count - seen))
            if seen + int(ones[: last + 1].sum(dtype=np.int64)) > count:
                raise WireError(f"{what} must end in 0 bits", at + first + last)
            return first + last + 1
        seen += here
    raise WireError(f"{what} must hold {count} numbers, got {seen}", at)


def _unary(data: memoryview) -> Iterator[Ints]:
    before = -1
    for first in range(0, len(data), CHUNK >> 3):
        bits = np.unpackbits(np.frombuffer(data[first : first + (CHUNK >> 3)], np.uint8), bitorder="little")
        ends = np.flatnonzero(bits)
        if ends.size:
            ends += first << 3
            yield np.diff(ends, prepend=before) - 1
            before = int(ends[-1])


def deflate(blocks: Iterable[Bytes8]) -> bytes:
    """Raw deflate with Huffman codes only, one code table for each of `blocks`."""
    coder = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    out = []
    for number, block in enumerate(blocks):
        if number:
            out.append(coder.flush(zlib.Z_BLOCK))
        out.append(coder.compress(block.data))
    return b"".join([*out, coder.flush()])


def inflate(data: memoryview, expected: int, offset: int) -> bytes:
    """Raw deflate back to exactly `expected` bytes; never makes more than one byte beyond them."""
    decoder = zlib.decompressobj(-15)
    try:
        out = decoder.decompress(data, expected + 1)
    except zlib.error as error:
        raise WireError(f"deflated part is damaged: {error}", offset) from None
    if len(out) != expected or not decoder.eof or decoder.unused_data:
        found = f"{len(out)}" if len(out) <= expected else f"more than {expected}"
        raise WireError(f"deflated part must hold exactly {expected} bytes, got {found}", offset)
    return out


def varint(number: int) -> bytes:
    """Seven bits a byte, the low ones first; the top bit says that more follow.

    >>> varint(300).hex()
    'ac02'
    """
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def order0_bits(counts: npt.NDArray[np.integer]) -> float:
    """The order-0 entropy, in bits in all, of symbols that occur that often.

    >>> order0_bits(np.array([4, 4, 8]))
    24.0
    """
    seen = counts[counts > 0].astype(np.float64)
    return float(seen @ (np.log2(seen.sum()) - np.log2(seen))) if seen.size else 0.0


def binary_bits(kept: int, total: int) -> float:
    """The entropy, in bits in all, of `total` independent bits of which `kept` are set."""
    return order0_bits(np.array([kept, total - kept]))
