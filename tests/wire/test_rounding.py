"""signSGD, top-k, unbiased sparsification, thresholding, AdaQuantFL: what is sent, and in how many bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safari.errors import SafariError, WireError
from safari.modes import ValueMode
from safari.wire import (
    Lossy,
    Shared,
    adaquant_levels,
    decode,
    decode_packet,
    encode,
    inspect,
    merge,
    packets,
    roundtrip,
    settle,
    with_residual,
)
from safari.wire.bits import Reader
from safari.wire.rounding.unbiased import probabilities
from safari.wire.values import read_inner
from wire.samples import (
    LOSSY_MODES,
    NEW_MODES,
    layout_of,
    lossy,
    models,
    same_bits,
    small_layout,
    small_model,
)

INNER = ("auto", "absolute", "difference", "bf16", "fp16", "int8", "qsgd", "sign")


@given(
    models(finite=True),
    st.sampled_from([*LOSSY_MODES, *NEW_MODES, "auto", "absolute", "difference"]),
    st.booleans(),
    st.sampled_from(INNER),
    st.sampled_from([0.01, 0.3, 1.0]),
)
def test_a_round_trip_is_what_is_decoded(model, values, relative, inner, fraction):
    layout, vector, mask, reference, predicted = model
    shared = Shared(layout, reference if relative else None, predicted)
    choices = {"inner": inner, "fraction": fraction, "ratio": 0.5}
    found = decode(encode(vector, mask, shared, values=values, lossy=lossy(**choices)), shared)
    assert same_bits(roundtrip(vector, mask, shared, values, lossy(**choices)), found.vector)
    assert found.mask.tolist() == mask.tolist()
    datagrams = packets(vector, mask, shared, limit=400, values=values, lossy=lossy(**choices))
    merged = merge((decode_packet(data, shared) for data in datagrams), layout)
    assert same_bits(merged.vector, found.vector)


def numbers(values, target, counts=None, **choices):
    """What is decoded for one prunable entry (or several), relative to zeros."""
    target = np.array(target, np.float32)
    layout = layout_of(counts or [target.size], [True] * len(counts or [0]))
    shared = Shared(layout, np.zeros(target.size, np.float32))
    return roundtrip(target, np.ones(target.size, bool), shared, values, lossy(**choices)).tolist()


def test_signs_have_the_mean_size_of_their_entry():
    assert numbers("sign", [3, -1, 2]) == [2, -2, 2]
    assert numbers("sign", [3, -1, 8, 0, 0, -1], counts=[2, 3, 1]) == [
        2,
        -2,
        2.671875,
        2.671875,
        2.671875,
        -1,
    ]
    assert numbers("sign", [0, 0]) == [0, 0]


def test_top_k_sends_the_largest_and_of_equals_the_first():
    assert numbers("top-k", [1, -3, 2, 2, 0.5], fraction=0.4) == [0, -3, 2, 0, 0]
    assert numbers("top-k", [1, 1, 1, 1], fraction=0.5) == [1, 1, 0, 0]
    assert numbers("top-k", [0.1, 0.2], fraction=0.01) == [0, pytest.approx(0.2)]
    assert numbers("top-k", [1, 2, 3], fraction=1.0) == [1, 2, 3]


def test_a_threshold_sends_its_own_size_once():
    assert numbers("threshold", [3, 0.5, -3, 2, -2.5], threshold=2.0) == [2, 0, -2, 0, -2]
    assert numbers("threshold", [100, 0, 0, 0], threshold=0.5) == [0.5, 0, 0, 0]


def test_probabilities_add_up_and_none_is_above_one():
    assert probabilities(np.array([8.0, 1, 1, 0]), 2).tolist() == [1, 0.5, 0.5, 0]
    assert probabilities(np.zeros(3), 2).tolist() == [0, 0, 0]
    assert probabilities(np.array([1.0, 0, 0]), 2).tolist() == [1, 0, 0]
    sizes = np.random.default_rng(0).exponential(size=1000) ** 3
    found = probabilities(sizes, 100)
    assert abs(found.sum() - 100) < 1e-4
    assert found.max() == 1
    free = found < 1
    assert np.allclose(found[free] / sizes[free], found[free][0] / sizes[free][0])


def test_unbiased_sparsification_is_right_on_average():
    target = np.array([4, -1, 0.5, 0.25, 0, -0.25], np.float32)
    layout = layout_of([6], [True])
    shared = Shared(layout, np.ones(6, np.float32))
    draws = [
        roundtrip(target + 1, np.ones(6, bool), shared, "unbiased", lossy(seed, fraction=0.5)) - 1
        for seed in range(3000)
    ]
    assert np.abs(np.mean(draws, axis=0) - target).max() < 0.06
    assert abs(np.mean([np.count_nonzero(draw) for draw in draws]) - 3) < 0.05
    assert all(draw[0] == 4 for draw in draws)


def recorded(values, **choices):
    """A model of 100,000 weights and some dense numbers near its reference, and its frame."""
    layout = layout_of([60_000, 40_000, 500], [True, True, False])
    vector, mask, reference, _ = small_model(layout)
    shared = Shared(layout, reference, mask)
    return (
        encode(vector, mask, shared, values=values, lossy=lossy(**choices)),
        shared,
        int(mask.sum()),
        vector,
    )


def test_a_sign_is_one_bit():
    frame, _, n, _ = recorded("sign")
    assert len(frame) == 18 + 16 + 3 * 2 + (n + 7) // 8


def test_a_threshold_is_near_its_entropy():
    frame, shared, _, vector = recorded("threshold", threshold=0.0025)
    seen = inspect(frame, shared)
    sent = int(np.count_nonzero(decode(frame, shared).vector != shared.reference * (vector != 0)))
    assert seen.modes.values == "sparse"
    assert seen.parts["sent"] < 1.06 * seen.bound["sent"] + 4
    assert seen.parts["symbols"] + seen.parts["raw"] < 1.6 * sent / 8 + 40
    assert sum(seen.parts.values()) == len(frame)


@pytest.mark.parametrize("values", ["top-k", "unbiased"])
def test_few_numbers_take_few_bytes(values):
    whole = len(recorded("auto")[0])
    frame, shared, n, _ = recorded(values, fraction=0.01)
    sent = 0.01 * (n - 500) + 500
    assert len(frame) < 5 * sent
    assert len(frame) < whole / 15
    assert len(recorded(values, fraction=0.01, inner="bf16")[0]) < 0.8 * len(frame)
    found = decode(frame, shared)
    untouched = (found.vector == shared.reference) & found.mask
    assert untouched.sum() > 0.98 * (n - 500)


def test_what_is_not_sent_without_a_reference_is_zero():
    layout = small_layout()
    vector, mask, *_ = small_model(layout)
    found = decode(encode(vector, mask, layout, values="top-k", lossy=lossy(fraction=0.1)), layout)
    assert found.mask.tolist() == mask.tolist()
    kept = np.count_nonzero(found.vector)
    assert kept == 10 + round(0.1 * (mask.sum() - 10))
    assert (found.vector[found.vector != 0] == vector[found.vector != 0]).all()


@pytest.mark.parametrize("values", ["sign", "top-k", "threshold"])
def test_with_memory_everything_arrives_in_the_end(values):
    """A change that is the same in every round comes through on average, large or small."""
    layout = layout_of([200], [True])
    rng = np.random.default_rng(0)
    change = rng.normal(0, 1e-2, 200).astype(np.float32)
    mask, residual = np.ones(200, bool), np.zeros(200, np.float32)
    model = np.zeros(200, np.float32)
    rounds = 400
    for _ in range(rounds):
        shared = Shared(layout, model, mask)
        target = with_residual(model + change, mask, residual)
        received = roundtrip(target, mask, shared, values, lossy(fraction=0.05, threshold=0.03))
        residual = settle(residual, target, received, mask, True)
        model = received
    assert np.abs(model / rounds - change).max() < 0.15 * np.abs(change).max()
    assert ValueMode(values).feeds_back


@given(st.integers(0, 2**32 - 1), st.sampled_from(NEW_MODES), st.sampled_from(INNER))
def test_variances_do_not_fall_below_zero(seed, values, inner):
    layout = layout_of([40, 20], [True, False])
    rng = np.random.default_rng(seed)
    reference = rng.exponential(1e-3, 60).astype(np.float32)
    vector = np.concatenate([rng.normal(size=40), rng.exponential(1e-4, 20)]).astype(np.float32)
    shared = Shared(layout, reference)
    found = roundtrip(vector, np.ones(60, bool), shared, values, lossy(seed, inner=inner, fraction=0.1))
    assert (found[40:] >= 0).all()


def test_levels_follow_the_loss():
    assert [adaquant_levels(4.0, loss, 3) for loss in (8.0, 4.0, 1.0, 0.25)] == [2, 3, 6, 12]
    assert adaquant_levels(1.0, 1e9, 1) == 1
    with pytest.raises(SafariError, match=r"^loss must be positive and finite, got 0$"):
        adaquant_levels(1.0, 0, 3)
    with pytest.raises(SafariError, match=r"^first_levels must be 1 to 127, got 0$"):
        adaquant_levels(1.0, 1.0, 0)
    coarse, fine = (len(recorded("qsgd", levels=levels)[0]) for levels in (1, 20))
    assert coarse < fine
    frame, shared, *_ = recorded("qsgd", levels=1)
    found = decode(frame, shared)
    change = (found.vector - shared.reference)[:60_000][found.mask[:60_000]]
    assert np.unique(np.abs(change.round(5))).size <= 3


def test_options_are_checked():
    for field, value, limit in (
        ("threshold", 0.0, "positive and finite"),
        ("fraction", 0.0, "above 0 and at most 1"),
        ("fraction", 1.5, "above 0 and at most 1"),
        ("levels", 0, "1 to 32767"),
        ("inner", "step", "one of auto, absolute"),
    ):
        with pytest.raises(SafariError, match=rf"^{field} must be {limit}.* got '?{value}"):
            Lossy(**{field: value})
    with pytest.raises(SafariError, match=r"^unbiased mode needs rng, the generator that rounds$"):
        roundtrip(np.ones(3, np.float32), np.ones(3, bool), layout_of([3], [True]), "unbiased")
    with pytest.raises(SafariError, match=r"^top-k mode needs finite values$"):
        numbers("top-k", [np.inf, 1])


@pytest.mark.parametrize(
    ("byte", "problem"),
    [
        (7, "inner coding must be one that writes numbers, got 7"),
        (9, "inner coding must be one that writes numbers, got 9"),
        (15, "inner coding must be one that writes numbers, got 15"),
        (1, "inner coding difference must be relative"),
        (0x52, "inner code of bf16 must be at most 0, got 5"),
    ],
)
def test_other_inner_codings_are_refused(byte, problem):
    with pytest.raises(WireError, match=f"^{problem} "):
        read_inner(Reader(bytes([byte])), False)


def test_modes_are_one_enum_of_plain_strings():
    assert [str(mode) for mode in ValueMode] == [
        "auto",
        "absolute",
        "difference",
        *LOSSY_MODES,
        *NEW_MODES,
    ]
    assert f"{ValueMode.TOP_K}" == "top-k"
    assert {mode for mode in ValueMode if mode.exact} == {"auto", "absolute", "difference"}
