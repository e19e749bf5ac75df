from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safari.errors import SafariError, WireError
from safari.wire import Shared, SharedKnowledgeError, covered, decode, decode_packet, encode, merge, packets
from wire.samples import (
    EXACT_MODES,
    LOSSY_MODES,
    MASK_MODES,
    layout_of,
    lossy,
    models,
    same_bits,
    small_layout,
    small_model,
)


@given(
    models(),
    st.sampled_from(["auto", *EXACT_MODES]),
    st.sampled_from(["auto", *MASK_MODES]),
    st.sampled_from([90, 200, 1200]),
    st.integers(0, 2**32 - 1),
)
def test_any_subset_in_any_order_is_exact_where_it_arrived(model, values, mask_mode, limit, seed):
    layout, vector, mask, reference, predicted = model
    shared = Shared(layout, reference, mask if mask_mode == "known" else predicted)
    datagrams = packets(vector, mask, shared, limit=limit, values=values, mask_mode=mask_mode)
    assert max(map(len, datagrams)) <= limit
    rng = np.random.default_rng(seed)
    order = [datagrams[i] for i in rng.permutation(len(datagrams))]
    whole = merge((decode_packet(data, shared) for data in order), layout)
    assert whole.arrived.all()
    assert same_bits(whole.vector, vector)
    assert whole.mask.tolist() == mask.tolist()
    some = order[: rng.integers(len(order) + 1)]
    part = merge((decode_packet(data, shared) for data in some), layout)
    assert same_bits(part.vector, np.where(part.arrived, vector, np.float32(0)))
    assert part.mask.tolist() == (mask & part.arrived).tolist()
    places = np.concatenate([np.empty(0, int), *(covered(data, layout) for data in some)])
    assert sorted(places.tolist()) == np.flatnonzero(part.arrived).tolist()


def test_a_part_knows_its_places():
    layout = small_layout()
    vector, mask, *_ = small_model(layout)
    for data in packets(vector, mask, layout, limit=150):
        part = decode_packet(data, layout)
        assert same_bits(part.vector, vector[part.positions])
        assert part.mask.tolist() == mask[part.positions].tolist()
        assert part.positions.tolist() == covered(data, Shared(layout)).tolist()


@pytest.mark.parametrize("values", LOSSY_MODES)
def test_lossy_packets_come_as_near_as_lossy_frames(values):
    layout = layout_of([2000, 30], [True, False])
    vector, mask, reference, _ = small_model(layout)
    shared = Shared(layout, reference, mask)
    datagrams = packets(vector, mask, shared, limit=100, values=values, lossy=lossy(ratio=0))
    assert len(datagrams) > 1
    found = merge((decode_packet(data, shared) for data in datagrams), shared)
    error = np.abs(found.vector - vector).max()
    assert 0 < error < {"bf16": 2e-5, "fp16": 2e-6, "int8": 3e-5, "qsgd": 1e-3, "step": 6e-4}[values]


def test_step_packets_share_the_step_of_the_whole_model():
    layout = layout_of([4000], [True])
    rng = np.random.default_rng(0)
    vector = (rng.normal(size=4000) * np.repeat([0.01, 1.0], 2000)).astype(np.float32)
    mask = np.ones(4000, bool)
    datagrams = packets(vector, mask, layout, limit=300, values="step", lossy=lossy(ratio=0))
    found = merge((decode_packet(data, layout) for data in datagrams), layout).vector
    step = np.unique(np.abs(found))[1]
    rms = np.sqrt(np.mean(vector.astype(np.float64) ** 2))
    assert abs(step / rms - 1) < 2**-8
    assert np.allclose(found / step, np.rint(vector / step), atol=1e-5)


@pytest.mark.parametrize("values", [*EXACT_MODES, *LOSSY_MODES])
def test_packets_say_what_the_frame_says(values):
    layout = small_layout()
    vector, mask, reference, predicted = small_model(layout)
    shared = Shared(layout, reference, predicted)
    frame = decode(encode(vector, mask, shared, values=values, lossy=lossy()), shared)
    datagrams = packets(vector, mask, shared, limit=50, values=values, lossy=lossy())
    assert len(datagrams) > 1
    merged = merge((decode_packet(data, shared) for data in datagrams), layout)
    assert same_bits(merged.vector, frame.vector)
    assert (merged.mask == frame.mask).all()


def test_packets_cost_little_more_than_a_frame():
    layout = layout_of([36864] * 3 + [64], [True] * 3 + [False])
    vector, mask, reference, predicted = small_model(layout)
    for shared in (Shared(layout), Shared(layout, reference), Shared(layout, reference, predicted)):
        one = len(encode(vector, mask, shared))
        many = sum(map(len, packets(vector, mask, shared)))
        assert one < many < 1.035 * one


def test_a_run_of_flips_without_kept_numbers_is_split_too():
    layout = layout_of([60_000], [True])
    mask = np.zeros(60_000, bool)
    predicted = np.random.default_rng(0).random(60_000) < 0.3
    shared = Shared(layout, None, predicted)
    datagrams = packets(np.zeros(60_000, np.float32), mask, shared, mask_mode="flips")
    assert max(map(len, datagrams)) <= 1200
    assert not merge((decode_packet(data, shared) for data in datagrams), layout).mask.any()


def test_what_is_missing_is_said():
    layout = small_layout()
    vector, mask, reference, predicted = small_model(layout)
    data = packets(vector, mask, Shared(layout, reference), values="difference")[0]
    problem = r"^context of layout, reference must be [0-9a-f]{2}, ours is incomplete \(at byte 2\)$"
    with pytest.raises(SharedKnowledgeError, match=problem):
        decode_packet(data, layout)
    problem = r"^context of layout, reference must be [0-9a-f]{2}, ours is [0-9a-f]{2} \(at byte 2\)$"
    with pytest.raises(SharedKnowledgeError, match=problem):
        decode_packet(data, layout, reference=vector)
    data = packets(vector, mask, Shared(layout, None, predicted), mask_mode="flips")[0]
    with pytest.raises(SharedKnowledgeError, match=r"^context of layout, predicted mask must be"):
        decode_packet(data, layout, predicted_mask=mask)


def test_the_checksum_finds_another_reference_when_its_byte_happens_to_agree():
    layout = small_layout()
    vector, mask, reference, _ = small_model(layout)
    data = packets(vector, mask, Shared(layout, reference), values="difference")[0]
    numbers = (np.full(layout.d, n, np.float32) for n in range(10_000))
    other = next(s for s in (Shared(layout, n) for n in numbers) if s.contexts[True, False][0] == data[2])
    with pytest.raises(WireError, match=r"^checksum must be"):
        decode_packet(data, other)


def test_limit_too_small_for_one_number():
    layout = small_layout()
    vector, mask, *_ = small_model(layout)
    with pytest.raises(SafariError, match=r"^limit must be at least \d+ for this model, got 12$"):
        packets(vector, mask, layout, limit=12)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda f: b"\xa0" + f[1:], r"^magic must be 0xb0, got 0xa0 \(at byte 0\)$"),
        (lambda f: b"\xb1" + f[1:], r"^code of absolute mode must be at most 0, got 1 \(at byte 1\)$"),
        (lambda f: f[:6], r"^checksum needs 4 bytes, 3 are left \(at byte 3\)$"),
        (lambda f: f[:-1], r"^checksum must be [0-9a-f]{8}, got [0-9a-f]{8} \(at byte 3\)$"),
    ],
)
def test_damage_is_named_with_its_place(change, problem):
    layout = small_layout()
    vector, mask, *_ = small_model(layout)
    with pytest.raises(WireError, match=problem):
        decode_packet(change(packets(vector, mask, layout)[0]), layout)
