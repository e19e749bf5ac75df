from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safari.errors import SafariError, WireError
from safari.wire import WireLayout, decode, encode, roundtrip
from safari.wire.bits import Reader
from safari.wire.kept import Kept
from safari.wire.rounding import Lossy, plans
from safari.wire.scales import from_bf16, to_bf16, upward
from safari.wire.symbols import (
    NIBBLES,
    alphabet,
    chained,
    decode_symbols,
    encode_symbols,
    pair,
    to_symbols,
    unchained,
    unpair,
    unzigzag,
    zigzag,
)
from safari.wire.values import ValueReader, encode_plan, ordered, unordered
from wire.samples import EXTREMES, layout_of, lossy

ONE = b"\x80\x3f"
WORDS = st.lists(st.integers(0, 2**32 - 1), max_size=50).map(lambda x: np.array(x, np.uint32))


def round_trip(mode, values, base=None, counts=None, choices=None):
    counts = np.array([values.size] if counts is None else counts, np.int64)
    kept = Kept(values, base, counts, values.size)
    (plan,) = plans(mode, kept, choices or lossy())
    coded = encode_plan(plan, kept)
    return read_values(mode, coded.code, coded.data, base, counts)


def read_values(mode, code, data, base, counts, at_once=7):
    reader = ValueReader(mode, code, Reader(data), counts)
    n = int(counts.sum())
    pieces = [np.empty(0, np.float32)]
    for first in range(0, n, at_once):
        piece = slice(first, min(first + at_once, n))
        pieces.append(reader.take(piece.stop - first, None if base is None else base[piece]))
    reader.finish()
    return np.concatenate(pieces)


@given(WORDS, st.integers(0, NIBBLES))
def test_every_number_has_its_symbol(numbers, code):
    numbers = np.concatenate([numbers, np.arange(40), 2**32 - 1 - np.arange(5), 1 << np.arange(32)]).astype(
        np.uint32
    )
    symbols, fields, widths = to_symbols(numbers, code)
    table = alphabet(code)
    assert (table.base[symbols] + fields == numbers).all()
    assert (fields.astype(np.uint64) >> widths.astype(np.uint64) == 0).all()
    assert table.base.size <= 255
    assert (np.diff(table.base.astype(np.int64)) == 1 << table.width[:-1].astype(np.int64)).all()


@given(WORDS)
def test_zigzag_and_order_come_back(words):
    assert (unzigzag(zigzag(words.view(np.int32))) == words.view(np.int32)).all()
    assert (unordered(ordered(words)) == words).all()
    floats = np.sort(words.view(np.float32)[np.isfinite(words.view(np.float32))])
    assert (np.diff(ordered(floats.view(np.uint32)).astype(np.int64))[np.diff(floats) > 0] > 0).all()


def test_zigzag_by_hand():
    assert zigzag(np.array([0, -1, 1, -2, 2**31 - 1, -(2**31)], np.int32)).tolist() == [
        0,
        1,
        2,
        3,
        2**32 - 2,
        2**32 - 1,
    ]


@given(st.lists(st.integers(0, 255), max_size=300), st.integers(0, 255))
def test_symbols_come_back(row, spread):
    symbols = np.array([100 + s % (spread + 1) for s in row], np.int64).astype(np.uint8)
    reader = Reader(encode_symbols(symbols, np.array([symbols.size])) + b"rest")
    assert decode_symbols(reader, symbols.size).tolist() == symbols.tolist()
    assert reader.left == 4


def test_pairs_come_back():
    for count in range(5):
        symbols = (np.arange(count) * 7 % 16).astype(np.uint8)
        assert pair(symbols).size == (count + 1) // 2
        assert unpair(pair(symbols), count).tolist() == symbols.tolist()
    assert pair(np.array([3, 10, 5], np.uint8)).tolist() == [0xA3, 0x05]


def test_bf16_rounds_to_nearest_even_and_keeps_nan():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001, 0xFFFFFFFF], np.uint32)
    assert to_bf16(bits.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFFFF]
    assert np.isnan(from_bf16(np.array([0x7FC0], np.uint16))).all()


@given(WORDS, st.integers(0, 2**32 - 1))
def test_exact_modes_keep_every_bit(words, seed):
    words = np.concatenate([words, EXTREMES])
    base = np.random.default_rng(seed).permutation(words)
    for mode, given_base in (("absolute", None), ("difference", base.view(np.float32))):
        found = round_trip(mode, words.view(np.float32), given_base)
        assert found.view(np.uint32).tolist() == words.tolist()


def test_half_modes_are_the_cast():
    values = np.random.default_rng(0).normal(size=100).astype(np.float32)
    assert (round_trip("fp16", values) == values.astype(np.float16).astype(np.float32)).all()
    assert (round_trip("bf16", values) == from_bf16(to_bf16(values))).all()


def test_relative_half_rounds_the_difference():
    rng = np.random.default_rng(0)
    base = rng.normal(size=100).astype(np.float32)
    values = base + rng.normal(0, 1e-3, 100).astype(np.float32)
    change = (values.astype(np.float64) - base).astype(np.float32)
    expected = (base.astype(np.float64) + from_bf16(to_bf16(change))).astype(np.float32)
    assert (round_trip("bf16", values, base) == expected).all()


def test_int8_by_hand():
    values = np.array([127.0, -63.4, 0.6, 2.54, -1.27], np.float32)
    found = round_trip("int8", values, counts=[3, 0, 2])
    # The scale 2.54 / 127 = 0.02 travels as the next bfloat16, 0.02001953125 = 41 / 2048.
    assert found.tolist() == [127, -63, 1, 127 * 41 / 2048, -63 * 41 / 2048]


def test_step_by_hand():
    # The root mean square of the differences 3, -3, 3, -3 is 3: each is one step.
    base = np.array([10, 20, 30, 40], np.float32)
    found = round_trip("step", base + np.array([3, -3, 3, -3], np.float32), base)
    assert found.tolist() == [13, 17, 33, 37]
    half = round_trip("step", base + np.array([4, -4, 4, -3.4], np.float32), base, choices=Lossy(step=0.25))
    assert np.abs(half - base - [4, -4, 4, -3.4]).max() <= 0.25 * 4 / 2


def test_step_is_set_by_the_prunable_numbers():
    kept = Kept(np.array([3, -3, 100], np.float32), None, np.array([2, 1]), steering=2)
    found = plans("step", kept, Lossy(step=0.5))[0].numbers
    assert found.scales.tolist() == [1.5]
    assert found.whole.tolist() == [2, -2, 67]


def test_a_step_is_longer_where_a_number_would_take_too_many():
    kept = Kept(np.array([1e-12, 1e3], np.float32), None, np.array([1, 1]), steering=1)
    found = plans("step", kept, Lossy())[0].numbers
    assert 1e3 / 2**30 <= found.scales[0] <= 1e3 / 2**30 * 1.01
    assert found.whole.max() <= 2**30
    assert abs(found.whole[1] * float(found.scales[0]) - 1e3) < 1e-6


def test_a_step_is_a_number_however_long():
    base = np.zeros(3, np.float32)
    assert round_trip(
        "step", np.array([1e30, 2e30, -1e30], np.float32), base, choices=Lossy(step=1e30)
    ).tolist() == [0, 0, 0]


@given(st.lists(st.floats(0, 3e38), min_size=1, max_size=20))
def test_scales_are_the_next_bfloat16(numbers):
    numbers = np.array(numbers)
    scales = upward(numbers)
    bits = scales.view(np.uint32)
    assert (scales >= numbers).all()
    assert not (bits & 0xFFFF).any()
    below = np.maximum(bits.astype(np.int64) - 0x10000, 0).astype(np.uint32).view(np.float32)
    assert ((below < numbers) | (bits == 0)).all()


def test_scales_beyond_the_largest_number_are_refused():
    with pytest.raises(SafariError, match=r"^values must be below 3.4e\+38$"):
        upward(np.array([3.4e38]))


@given(st.lists(st.integers(-3, 3), max_size=40).map(lambda x: np.array(x, np.int32)))
def test_signs_follow_the_last_number_that_is_not_zero(numbers):
    found = chained(numbers)
    last = 1
    for number, turned in zip(numbers.tolist(), found.tolist(), strict=True):
        assert turned == number * last
        last = last if number == 0 else (-1 if number < 0 else 1)
    assert (unchained(found) == numbers).all()


def test_nothing_changed_takes_no_step():
    base = np.arange(5, dtype=np.float32)
    assert (round_trip("step", base, base) == base).all()
    assert (round_trip("int8", base, base) == base).all()


def test_qsgd_is_unbiased_and_within_one_level():
    rng = np.random.default_rng(3)
    values = rng.normal(size=64).astype(np.float32)
    step = np.abs(values).max() / 3
    layout, mask = layout_of([64], [True]), np.ones(64, bool)
    drawn = np.stack([roundtrip(values, mask, layout, "qsgd", lossy(seed, bits=3)) for seed in range(600)])
    assert np.abs(drawn - values).max() <= step * 1.0001
    # The spread of one draw is at most half a step; of the mean of 600, a 24th of that.
    assert np.abs(drawn.mean(axis=0) - values).max() < 5 * step / 2 / np.sqrt(600)
    assert np.unique(np.rint(drawn / step)).size <= 7


@pytest.mark.parametrize("mode", ["int8", "qsgd", "step"])
def test_integer_modes_refuse_what_is_not_finite(mode):
    with pytest.raises(SafariError, match=f"^{mode} mode needs finite values$"):
        round_trip(mode, np.array([1, np.nan], np.float32))


def test_choices_are_checked():
    with pytest.raises(SafariError, match=r"^bits must be 2 to 8, got 1$"):
        Lossy(bits=1)
    with pytest.raises(SafariError, match=r"^step must be positive and finite, got 0$"):
        Lossy(step=0)
    with pytest.raises(SafariError, match=r"^qsgd mode needs rng, the generator that rounds$"):
        round_trip("qsgd", np.ones(3, np.float32), choices=Lossy())


@pytest.mark.parametrize(
    ("mode", "code", "data", "problem"),
    [
        ("absolute", 0, bytes([5]), r"^symbol coder must be 0 to 2 or 8 to 15, got 5 \(at byte 0\)$"),
        (
            "absolute",
            0,
            bytes([8, 120, 1]),
            r"^raw bits must take the last 3 bytes, 0 are left \(at byte 3\)$",
        ),
        ("absolute", 0, bytes([8, 120, 1, 1, 2, 3, 4]), r"^raw bits must take the last 3 bytes, 4 are left"),
        (
            "step",
            3,
            b"\x80\xff" + bytes([8, 0, 1]),
            r"^scales must be finite and at least 0 \(at byte 0\)$",
        ),
        (
            "step",
            3,
            ONE + bytes([8, 240, 1]),
            r"^symbols must be below 240, got 240 \(at byte 2\)$",
        ),
        (
            "absolute",
            0,
            bytes([1, 250, 6]),
            r"^table must end at symbol 255, got 256 \(at byte 0\)$",
        ),
        ("absolute", 0, bytes([1, 5, 1, 0xFF]), r"^table must hold a symbol \(at byte 3\)$"),
        ("absolute", 0, bytes([2, 0, 0]), r"^table needs 8 bytes, 2 are left \(at byte 1\)$"),
        ("absolute", 0, bytes([1, 5, 0, 0]), r"^symbols must hold 1 code words \(at byte 4\)$"),
        (
            "step",
            4,
            ONE + bytes([8, 15, 1]) + b"\xff" * 4,
            r"^numbers must be at most 4294967295",
        ),
    ],
)
def test_damaged_numbers_are_named(mode, code, data, problem):
    with pytest.raises(WireError, match=problem):
        read_values(mode, code, data, None, np.array([1]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", ["auto", "bf16", "fp16"])
def test_a_signalling_nan_is_encoded_without_a_warning(values):
    """Its bits stay where they are sent exactly; in 16 bits it is a quiet one."""
    vector = np.linspace(-1, 1, 64, dtype=np.float32)
    reference = vector * np.float32(1.01)
    vector.view(np.uint32)[3] = 0x7F800001
    layout, mask = WireLayout(["w"], [64], [True]), np.ones(64, bool)
    frame = encode(vector, mask, layout, reference=reference, values=values)
    back = decode(frame, layout, reference=reference).vector
    assert np.isnan(back).tolist() == np.isnan(vector).tolist()
