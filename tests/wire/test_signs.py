"""Lossy modes make no dense number negative that was not, whatever the reference holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safari.wire import Lossy, Shared, decode, decode_packet, encode, merge, packets
from safari.wire.kept import Kept
from safari.wire.rounding import plans
from safari.wire.scales import from_bf16, to_bf16
from safari.wire.signs import next_above
from wire.samples import LOSSY_MODES, around_zero, layout_of, lossy, same_bits


def dense_of(layout):
    return ~np.repeat(np.array(layout.prunable), layout.sizes)


@given(around_zero(), st.sampled_from(LOSSY_MODES), st.booleans(), st.floats(0.1, 8), st.integers(0, 9))
def test_dense_numbers_keep_their_sign(model, values, relative, step, seed):
    layout, vector, mask, reference = model
    shared = Shared(layout, reference if relative else None)
    own = {"bits": 2 + seed % 7, "step": step, "ratio": seed}
    found = decode(encode(vector, mask, shared, values=values, lossy=lossy(seed, **own)), shared).vector
    assert not (dense_of(layout) & (vector >= 0) & (found < 0)).any()
    datagrams = packets(vector, mask, shared, limit=90, values=values, lossy=lossy(seed, **own))
    merged = merge((decode_packet(data, shared) for data in datagrams), layout)
    assert same_bits(merged.vector, found)


@given(around_zero(), st.sampled_from(["int8", "qsgd", "step"]), st.integers(0, 9))
def test_a_number_is_at_most_one_scale_off(model, values, seed):
    layout, vector, _, reference = model
    order = layout.to_wire(np.arange(layout.d))
    kept = Kept(vector[order], reference[order], layout.wire_sizes, layout.prunable_total)
    found = plans(values, kept, lossy(seed, bits=2 + seed % 7))[0].numbers
    scales = found.scales.astype(np.float64)
    each = np.broadcast_to(scales, layout.d) if values == "step" else np.repeat(scales, layout.wire_sizes)
    off = kept.base + found.whole * each - kept.values.astype(np.float64)
    assert (np.abs(off) <= each * (1 + 1e-6)).all()
    most = {"int8": 127, "qsgd": 2 ** (1 + seed % 7) - 1, "step": 2**30}[values]
    assert np.abs(found.whole).max() <= most


def test_by_hand():
    # One step is 1. Rounded to nearest, 0.7 would go to -0.3 when it falls to 0 or to 0.1.
    layout = layout_of([2, 4], [True, False])
    reference = np.array([5, 5, 0.7, 0.7, 0.7, 1.75], np.float32)
    vector = np.array([6, 4, 0, 0.1, -0.1, 0], np.float32)
    shared = Shared(layout, reference)
    frame = encode(vector, np.ones(6, bool), shared, values="step", lossy=Lossy(ratio=0))
    expected = np.array([6, 4, 0.7, 0.7, np.float64(np.float32(0.7)) - 1, 0.75], np.float32)
    assert decode(frame, shared).vector.tolist() == expected.tolist()


def test_weights_are_rounded_to_nearest_as_ever():
    layout = layout_of([4, 1], [True, False])
    reference = np.array([5, 0.7, -5, 5, 0], np.float32)
    vector = np.array([6, 0, -6, 6, 0], np.float32)
    shared = Shared(layout, reference)
    found = decode(encode(vector, np.ones(5, bool), shared, values="step"), shared).vector
    assert found[1] < 0


@pytest.mark.parametrize("values", ["bf16", "fp16"])
def test_numbers_of_16_bits_are_rounded_up_where_the_nearest_is_below(values):
    # 1.0035 lies between two neighbours of either kind; a fall by all of it must not go further.
    layout = layout_of([3], [False])
    reference = np.array([1.0035, 1.0035, -1.0035], np.float32)
    vector = np.array([0, -1e-6, 0], np.float32)
    shared = Shared(layout, reference)
    found = decode(encode(vector, np.ones(3, bool), shared, values=values), shared).vector
    gap = {"bf16": 2**-7, "fp16": 2**-10}[values]
    assert 0 <= found[0] < gap
    assert found[1] < 0 or values == "bf16"
    assert 0 <= found[2] < gap


def test_beyond_what_16_bits_hold():
    # A fall that is no number in binary16 becomes the largest that is; a rise stays what it was.
    layout = layout_of([2], [False])
    reference = np.array([1e5, -65510], np.float32)
    shared = Shared(layout, reference)
    found = decode(encode(np.zeros(2, np.float32), np.ones(2, bool), shared, values="fp16"), shared).vector
    assert found.tolist() == [1e5 - 65504, -6]


@given(st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=1))
def test_the_next_above_is_numpys(numbers):
    halves = np.array(numbers, np.float16)
    halves = halves[(halves.view(np.uint16) != 0x8000)]
    assert (
        next_above(halves.view(np.uint16)).view(np.float16) == np.nextafter(halves, np.float16(np.inf))
    ).all()


def test_the_next_above_of_a_bfloat16():
    bits = to_bf16(np.array([1, -1, 0, 2], np.float32))
    assert from_bf16(next_above(bits)).tolist() == [1 + 2**-7, -1 + 2**-8, 2.0**-133, 2 + 2**-6]
