from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safari.errors import WireError
from safari.wire.bits import (
    Reader,
    binary_bits,
    deflate,
    inflate,
    pack_fields,
    read_unary,
    rice_encode,
    unpack_fields,
    varint,
)


def bits_one_by_one(values, widths):
    """The oracle: a string of 0 and 1, least significant bit first."""
    text = "".join(format(v, "b").zfill(w)[::-1] if w else "" for v, w in zip(values, widths, strict=True))
    text += "0" * (-len(text) % 8)
    return bytes(int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8))


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 32)), max_size=60))
def test_fields_are_a_plain_bit_string(pairs):
    values = np.array([v & ((1 << w) - 1) for v, w in pairs], np.uint32)
    widths = np.array([w for _, w in pairs], np.uint8)
    data = pack_fields(values, widths)
    assert data == bits_one_by_one(values.tolist(), widths.tolist())
    assert unpack_fields(data, len(pairs), widths).tolist() == values.tolist()


@pytest.mark.parametrize("width", [0, 1, 5, 8, 16, 24, 31, 32])
def test_fields_of_one_width_need_no_list_of_widths(width):
    values = (np.arange(37, dtype=np.uint64) * 0x9E3779B9 % (1 << width)).astype(np.uint32)
    data = pack_fields(values, width)
    assert data == bits_one_by_one(values.tolist(), [width] * 37)
    assert unpack_fields(data, 37, width).tolist() == values.tolist()


@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(0, 12), st.binary(max_size=5))
def test_rice_codes_come_back_and_leave_the_rest(numbers, k, rest):
    unary, remainders = rice_encode(np.array(numbers, np.int64), k)
    reader = Reader(unary + remainders + rest)
    chunks = read_unary(reader, len(numbers), sum((n >> k) + 1 for n in numbers), "numbers")
    quotients = np.concatenate([np.empty(0, np.int64), *chunks])
    assert bytes(reader.take(len(remainders), "remainders")) == remainders
    found = (quotients << k) + unpack_fields(remainders, len(numbers), k)
    assert found.tolist() == numbers
    assert reader.left == len(rest)


def test_unary_must_be_complete_and_clean():
    with pytest.raises(WireError, match=r"^row must hold 3 numbers, got 2 \(at byte 0\)$"):
        read_unary(Reader(b"\x11"), 3, 100, "row")
    with pytest.raises(WireError, match=r"^row must end in 0 bits \(at byte 0\)$"):
        read_unary(Reader(b"\x11"), 1, 100, "row")


@given(st.integers(0, 2**35 - 1))
def test_varints_come_back(number):
    reader = Reader(varint(number))
    assert reader.varint("number", 2**35) == number
    assert reader.left == 0


def test_reader_names_what_is_wrong_and_where():
    reader = Reader(b"\x05\xff\xff\xff\xff\xff\xff")
    assert reader.byte("tag") == 5
    with pytest.raises(WireError, match=r"^count is longer than 5 bytes \(at byte 1\)$"):
        reader.varint("count", 10)
    with pytest.raises(WireError, match=r"^scales needs 9 bytes, 1 are left \(at byte 6\)$"):
        reader.take(9, "scales")
    with pytest.raises(WireError, match=r"^count must be at most 10, got 11 \(at byte 0\)$"):
        Reader(b"\x0b").varint("count", 10)


def test_deflate_is_bounded_and_complete():
    row = np.frombuffer(b"abcabcabd" * 50, np.uint8)
    data = deflate([row[:200], row[200:]])
    assert inflate(memoryview(data), row.size, 0) == row.tobytes()
    bomb = zlib.compress(bytes(10_000_000), 9)[2:-4]
    with pytest.raises(WireError, match=r"must hold exactly 100 bytes, got more than 100 \(at byte 7\)$"):
        inflate(memoryview(bomb), 100, 7)
    with pytest.raises(WireError, match=r"must hold exactly 451 bytes, got 450 \(at byte 7\)$"):
        inflate(memoryview(data), 451, 7)
    with pytest.raises(WireError, match=r"must hold exactly 450 bytes, got 450 \(at byte 7\)$"):
        inflate(memoryview(data + b"x"), 450, 7)
    with pytest.raises(WireError, match=r"^deflated part is damaged: .* \(at byte 7\)$"):
        inflate(memoryview(b"\xff\xff\xff"), 3, 7)


def test_entropy_of_bits_by_hand():
    assert binary_bits(0, 100) == 0
    assert binary_bits(50, 100) == pytest.approx(100)
    assert binary_bits(1, 4) == pytest.approx(0.25 * 4 * 2 + 0.75 * 4 * np.log2(4 / 3))
