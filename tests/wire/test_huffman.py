from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safari.errors import WireError
from safari.wire.bits import Reader
from safari.wire.huffman import (
    ABSENT,
    LEVELS,
    LONGEST,
    MOST_BYTES,
    code_of,
    decode_rows,
    encode_rows,
    levels_of,
    listed_code,
    paired_code,
    sparse_code,
)
from wire import plain_decoder

WEIGHTS = st.lists(st.integers(0, 2**40), min_size=1, max_size=256).filter(any)


def padded(weights):
    return [*weights, *[0] * (256 - len(weights))]


@given(WEIGHTS)
def test_words_are_a_complete_prefix_code_of_at_most_15_bits(weights):
    code = code_of(padded(weights))
    lengths = code.lengths[code.lengths > 0].astype(int)
    assert (code.lengths > 0).tolist() == [weight > 0 for weight in padded(weights)]
    assert lengths.max() <= LONGEST
    filled = sum(2.0**-length for length in lengths.tolist())
    assert filled == (1 if lengths.size > 1 else 0.5)


@given(WEIGHTS)
def test_words_are_those_of_the_page(weights):
    code = code_of(padded(weights))
    theirs = plain_decoder.code_words(weights)
    ours = {}
    for symbol in np.flatnonzero(code.lengths).tolist():
        length = int(code.lengths[symbol])
        ours[length, int(f"{int(code.words[symbol]):0{length}b}"[::-1], 2)] = symbol
    assert ours == theirs


def test_a_balanced_code_costs_the_entropy():
    code = code_of(padded([4, 2, 1, 1]))
    assert code.lengths[:4].tolist() == [1, 2, 3, 3]
    assert code.bits(np.bincount([0, 0, 0, 0, 1, 1, 2, 3], minlength=256)) == 14


def test_very_unequal_weights_stay_within_15_bits():
    assert int(code_of([2**n for n in range(60)] + [0] * 196).lengths.max()) == LONGEST
    assert int(sparse_code(1, 63).lengths.max()) <= LONGEST


@given(
    st.lists(st.lists(st.integers(0, 255), max_size=60), min_size=1, max_size=3),
    st.integers(1, 127),
    st.integers(0, 63),
    st.binary(max_size=3),
)
def test_rows_come_back_and_what_follows_stays(rows, density, blanks, rest):
    rows = [np.array(row, np.uint8) for row in rows]
    codes = [sparse_code(density, (blanks + number) % 64) for number in range(len(rows))]
    reader = Reader(encode_rows(rows, codes) + rest)
    found = decode_rows(reader, [row.size for row in rows], codes, "row")
    assert [row.tolist() for row in found] == [row.tolist() for row in rows]
    assert bytes(reader.take(reader.left, "rest")) == rest


def test_pairs_and_lists_weigh_what_they_say():
    levels = (0, 2, *[ABSENT] * 14)
    pairs = paired_code(levels)
    assert np.flatnonzero(pairs.lengths).tolist() == [0x00, 0x01, 0x10, 0x11]
    assert pairs.lengths[[0x00, 0x01, 0x10, 0x11]].tolist() == [1, 3, 2, 3]
    assert np.flatnonzero(listed_code(250, (0, ABSENT, 1)).lengths).tolist() == [250, 252]


def test_levels_are_half_bits_and_then_whole_ones():
    assert list(LEVELS[:10]) == [round(2 ** (16 - n / 2)) for n in range(10)]
    assert list(LEVELS[10:15]) == [round(2 ** (16 - n)) for n in (5.5, 6.5, 7.5, 8.5, 10)]
    assert levels_of(np.array([0, 1024, 1])) == (ABSENT, 0, 14)


def test_damaged_rows_are_named():
    code = code_of(padded([1]))
    with pytest.raises(WireError, match=r"^row must hold 9 code words \(at byte 0\)$"):
        decode_rows(Reader(b"\0"), [9], [code], "row")
    # The one symbol has the word 0: a 1 begins none.
    with pytest.raises(WireError, match=r"^row must hold 3 code words \(at byte 0\)$"):
        decode_rows(Reader(b"\2"), [3], [code], "row")
    with pytest.raises(WireError, match=r"^row must end in 0 bits \(at byte 0\)$"):
        decode_rows(Reader(b"\x80"), [3], [code], "row")
    with pytest.raises(WireError, match=rf"^row must be at most {MOST_BYTES} bytes under such a code, got"):
        decode_rows(Reader(b""), [MOST_BYTES + 1], [code], "row")
