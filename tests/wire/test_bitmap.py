from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safari.errors import WireError
from safari.wire.bitmap import COMPLEMENT, MODELLED, PACKED, decode_bitmap, encode_bitmap
from safari.wire.bits import Reader, binary_bits, varint


@given(
    st.lists(st.integers(0, 300), max_size=6),
    st.lists(st.sampled_from([0.0, 0.003, 0.05, 0.2, 0.5, 0.9, 1.0]), min_size=6, max_size=6),
    st.integers(0, 2**32 - 1),
)
def test_any_bits_in_any_segments_come_back(sizes, densities, seed):
    rng = np.random.default_rng(seed)
    bits = rng.random(sum(sizes)) < np.repeat(densities[: len(sizes)], sizes)
    reader = Reader(encode_bitmap(bits, np.array(sizes, np.int64)))
    assert decode_bitmap(reader, np.array(sizes, np.int64)).tolist() == bits.tolist()
    assert reader.left == 0


@pytest.mark.parametrize("density", [0.002, 0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 0.95])
def test_size_stays_near_the_entropy(density):
    sizes = np.array([500, 9000, 36864, 36864], np.int64)
    bits = np.random.default_rng(0).random(int(sizes.sum())) < density
    entropy = binary_bits(int(bits.sum()), bits.size) / 8
    assert len(encode_bitmap(bits, sizes)) < 1.04 * entropy + 30


def test_segments_choose_for_themselves():
    sizes = np.array([8000, 120_000, 8000, 8000], np.int64)
    densities = np.repeat([0.01, 0.2, 0.99, 0.0], sizes)
    bits = np.random.default_rng(1).random(int(sizes.sum())) < densities
    data = encode_bitmap(bits, sizes)
    reader = Reader(data)
    rice = reader.byte("tag")
    assert rice == 6
    assert reader.varint("count", 8000) == bits[:8000].sum()
    assert reader.byte("tag") == PACKED
    assert reader.byte("tag") == rice | COMPLEMENT
    pieces = np.split(bits, np.cumsum(sizes)[:-1])
    entropy = sum(binary_bits(int(piece.sum()), piece.size) for piece in pieces) / 8
    assert len(data) < 1.03 * entropy


def test_one_segment_by_hand():
    # Gaps 2 and 3 with k = 1: quotients 1 and 1 are the bits 01 01, remainders 0 and 1.
    bits = np.array([0, 0, 1, 0, 0, 0, 1, 0], bool)
    data = bytes([1, 2, 0b1010, 0b10])
    assert decode_bitmap(Reader(data), np.array([8])).tolist() == bits.tolist()
    flipped = bytes([1 | COMPLEMENT]) + data[1:]
    assert decode_bitmap(Reader(flipped), np.array([8])).tolist() == (~bits).tolist()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (bytes([25, 1]), r"^mask tag must be 31, 32 or a Rice parameter up to 24, got 25 \(at byte 0\)$"),
        (bytes([32, 0, 0]), r"^mask model must be 1 to 127 and 0 to 63, got 0 and 0 \(at byte 1\)$"),
        (bytes([32, 128, 0]), r"^mask model must be 1 to 127 and 0 to 63, got 128 and 0 \(at byte 1\)$"),
        (bytes([160, 64, 64]), r"^mask model must be 1 to 127 and 0 to 63, got 64 and 64 \(at byte 1\)$"),
        (bytes([32, 64]), r"^mask model needs 2 bytes, 1 are left \(at byte 1\)$"),
        (bytes([32, 64, 0]), r"^mask bits must hold 1 code words \(at byte 3\)$"),
        (bytes([0, 9]), r"^mask count must be at most 8, got 9 \(at byte 1\)$"),
        (bytes([1, 2, 0b1010]), r"^mask remainders needs 1 bytes, 0 are left \(at byte 3\)$"),
        (bytes([1, 1, 0b10000, 1]), r"^mask gaps run beyond the end of their segment \(at byte 3\)$"),
        (bytes([PACKED]) + varint(67), r"^mask bits length must be at most 66, got 67 \(at byte 1\)$"),
    ],
)
def test_every_count_is_checked(data, problem):
    with pytest.raises(WireError, match=problem):
        decode_bitmap(Reader(data), np.array([8]))


def test_packed_padding_must_be_clean():
    blanks = np.random.default_rng(0).random(800) < 0.4 * np.repeat(np.arange(100) % 2, 8)
    for row, tag in (([1, 0, 1, 0, 1, 0, 1, 1] * 40, PACKED), ([*blanks, *[1] * 8], MODELLED)):
        whole = encode_bitmap(np.array(row, bool), np.array([len(row)]))
        assert whole[0] & ~COMPLEMENT == tag
        with pytest.raises(WireError, match=r"^mask bits beyond the end of a segment must be 0"):
            decode_bitmap(Reader(whole), np.array([len(row) - 3]))


def test_blank_bytes_cost_less_than_their_bits():
    rng = np.random.default_rng(0)
    bits = (rng.random((400, 8)) < 0.4) & (rng.random((400, 1)) < 0.5)
    data = encode_bitmap(bits.ravel(), np.array([3200]))
    assert data[0] == MODELLED
    assert abs(data[1] / 128 - 0.4) < 0.03
    assert abs(data[2] / 64 - 0.5) < 0.1
    assert len(data) < 0.85 * binary_bits(int(bits.sum()), 3200) / 8
    flipped = encode_bitmap(~bits.ravel(), np.array([3200]))
    assert flipped[0] == MODELLED | COMPLEMENT
    assert flipped[1:] == data[1:]
    assert (decode_bitmap(Reader(flipped), np.array([3200])) == ~bits.ravel()).all()
