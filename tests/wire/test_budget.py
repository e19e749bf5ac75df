"""Step mode within a budget: which rounding is taken, what it loses, and that frames keep to it."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safari.errors import SafariError
from safari.wire import Lossy, Shared, decode, encode, packets, settle, with_residual
from safari.wire.budget import (
    CENTRES,
    EDGES,
    STEPS_FROM,
    at_most_bits,
    choose_rounding,
    coded_bits,
    size_classes,
    step_classes,
    steps_bits,
    tally,
)
from safari.wire.kept import Kept
from safari.wire.rounding import plans
from wire.samples import layout_of

SHAPES = ["normal", "laplace", "uniform", "smooth"]


def update(shape, size, seed=0):
    rng = np.random.default_rng(seed)
    if shape == "smooth":
        return np.convolve(rng.normal(size=size + 3), np.ones(4) / 2, "valid")
    return rng.uniform(-1.7, 1.7, size) if shape == "uniform" else getattr(rng, shape)(size=size)


def sent(shape, density=0.5, seed=0):
    """A model of 60,000 weights and 300 other numbers, and what both ends hold before it travels."""
    layout = layout_of([20_000, 40_000, 300], [True, True, False])
    rng = np.random.default_rng(seed)
    mask = (rng.random(layout.d) < density) | (np.arange(layout.d) >= 60_000)
    reference = rng.normal(0, 0.1, layout.d).astype(np.float32)
    change = update(shape, layout.d, seed) * np.where(np.arange(layout.d) < 60_000, 1e-3, 1e-2)
    vector = np.where(mask, reference + change, 0).astype(np.float32)
    return vector, mask, Shared(layout, reference, mask)


def lost(vector, mask, shared, ratio):
    """The bytes of a frame, and the share of the weights' squares that does not arrive."""
    frame = encode(vector, mask, shared, values="step", lossy=Lossy(ratio=ratio))
    kept = mask & (np.arange(mask.size) < 60_000)
    missing = (decode(frame, shared).vector.astype(np.float64) - vector)[kept]
    change = (vector.astype(np.float64) - shared.reference)[kept]
    return len(frame), float(missing @ missing / (change @ change))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ratio", [20, 35, 42, 50, 57])
def test_a_frame_is_at_most_its_share_of_dense(shape, ratio):
    vector, mask, shared = sent(shape)
    size, error = lost(vector, mask, shared, ratio)
    assert size <= 4 * vector.size / ratio
    assert error <= 0.5


@pytest.mark.parametrize("shape", SHAPES)
def test_what_fits_is_rounded_as_asked(shape):
    vector, mask, shared = sent(shape, density=0.2)
    asked = encode(vector, mask, shared, values="step", lossy=Lossy(ratio=0))
    assert len(asked) < 4 * vector.size / 65
    assert encode(vector, mask, shared, values="step") == asked


@pytest.mark.parametrize("shape", SHAPES)
def test_less_room_loses_more(shape):
    found = [lost(*sent(shape), ratio) for ratio in (0, 25, 40, 50, 57)]
    sizes, errors = zip(*found, strict=True)
    assert list(sizes) == sorted(sizes, reverse=True)
    assert list(errors) == sorted(errors)


def test_a_mask_of_its_own_takes_room_from_the_numbers():
    vector, mask, shared = sent("smooth")
    flips = (np.random.default_rng(5).random(mask.size) < 0.02) & (np.arange(mask.size) < 60_000)
    own = Shared(shared.layout, shared.reference, mask ^ flips)
    known, said = lost(vector, mask, shared, 45), lost(vector, mask, own, 45)
    assert max(known[0], said[0]) <= 4 * vector.size / 45
    assert said[1] > known[1]


def test_where_nothing_fits_the_signs_are_sent():
    vector, mask, shared = sent("uniform", density=1.0)
    frame = encode(vector, mask, shared, values="step", lossy=Lossy(ratio=1000))
    change = (vector.astype(np.float64) - shared.reference)[:60_000]
    found = (decode(frame, shared).vector.astype(np.float64) - shared.reference)[:60_000]
    assert (np.sign(found) == np.sign(change)).all()
    assert np.ptp(np.abs(found)) < 1e-6
    assert np.abs(found).mean() == pytest.approx(np.abs(change).mean(), rel=0.01)


def test_what_did_not_move_stays_where_it_is():
    vector, mask, shared = sent("normal")
    still = mask & (np.arange(mask.size) % 3 == 0)
    vector[still] = shared.reference[still]
    for ratio in (50, 70, 100, 1000):
        frame = encode(vector, mask, shared, values="step", lossy=Lossy(ratio=ratio))
        assert (decode(frame, shared).vector == vector)[still & (np.arange(mask.size) < 60_000)].all()


def test_a_small_number_yields_to_its_neighbour():
    rng = np.random.default_rng(0)
    # Fours that move the same way, but for half of the small ones among them; the last has no partner.
    signs = np.repeat(rng.choice([-1.0, 1.0], 9000), 4)
    small = np.tile([False, True, False, False], 9000)
    turned = small & (rng.random(signs.size) < 0.5)
    numbers = (np.where(small, 0.1, 1.0) * np.where(turned, -signs, signs)).astype(np.float32)[:-1]
    kept = Kept(numbers, None, np.array([numbers.size]), numbers.size)
    own = plans("step", kept, Lossy(), room=1.2 * numbers.size)[0].numbers
    assert own.whole.tolist() == np.sign(numbers).tolist()
    yielding = plans("step", kept, Lossy(), room=0.9 * numbers.size)[0].numbers
    assert yielding.whole.tolist() == signs[:-1].tolist()
    # The same with the small number before the large one; neighbours in different pairs do not count.
    swapped = np.append(numbers[:-1].reshape(-1, 2)[:, ::-1].ravel(), numbers[-1])
    kept = Kept(swapped, None, np.array([swapped.size]), swapped.size)
    assert (
        plans("step", kept, Lossy(), room=0.85 * numbers.size)[0].numbers.whole.tolist()
        == signs[:-1].tolist()
    )


def test_packets_keep_to_the_rounding_of_the_frame():
    vector, mask, shared = sent("smooth")
    choices = {"values": "step", "lossy": Lossy(ratio=55)}
    datagrams = packets(vector, mask, shared, **choices)
    frame = encode(vector, mask, shared, **choices)
    assert len(frame) < sum(map(len, datagrams)) < 1.035 * len(frame)


def test_error_feedback_makes_up_for_signs():
    vector, mask, shared = sent("normal")
    change = np.where(mask, vector - shared.reference, 0)[:60_000].astype(np.float64)
    residual, total = np.zeros_like(vector), np.zeros(60_000)
    for _ in range(30):
        target = with_residual(vector, mask, residual)
        frame = encode(target, mask, shared, values="step", lossy=Lossy(ratio=57))
        received = decode(frame, shared).vector
        residual = settle(residual, target, received, mask, True)
        total += np.where(mask, received - shared.reference, 0)[:60_000]
    missing = total / 30 - change
    assert missing @ missing < 0.01 * (change @ change)


@given(st.lists(st.tuples(st.integers(0, 40_000), st.booleans()), max_size=60), st.integers(1, 50))
def test_the_quick_bound_is_one(numbers, times):
    steps = np.array([size for size, _ in numbers] * times, np.int64)
    negative = np.array([flag for _, flag in numbers] * times, bool) & (steps > 0)
    classes = step_classes(steps)
    exact = steps_bits(tally(classes, negative, STEPS_FROM.size))
    assert exact <= at_most_bits(np.bincount(classes, minlength=STEPS_FROM.size)) + 1e-6


@given(st.lists(st.floats(0, 20), max_size=30), st.lists(st.integers(0, 70_000), max_size=30))
def test_classes_are_those_of_their_edges(sizes, steps):
    sizes, steps = np.array(sizes, np.float64), np.array(steps, np.int64)
    assert size_classes(sizes).tolist() == np.searchsorted(EDGES, sizes, "left").tolist()
    assert step_classes(steps).tolist() == (np.searchsorted(STEPS_FROM, steps, "right") - 1).tolist()


def test_estimates_are_near_what_is_written():
    for shape in SHAPES:
        vector, mask, shared = sent(shape)
        kept = vector[mask].astype(np.float64) - shared.reference[mask]
        n = int(mask[:60_000].sum())
        scale = np.sqrt(np.mean(kept[:n] ** 2))
        whole = np.rint(kept[:n] / scale).astype(np.int64)
        about = steps_bits(tally(step_classes(np.abs(whole)), whole < 0, STEPS_FROM.size)) / 8
        written = len(encode(vector, mask, shared, values="step", lossy=Lossy(ratio=0)))
        assert 0.9 * written < about < 1.1 * written


def test_rounding_of_a_tally_by_hand():
    # All sizes in (7/8, 1], half of the signs alike: one value loses nearly nothing.
    pairs = np.zeros((CENTRES.size, 2, CENTRES.size), np.int64)
    pairs[9, :, 9] = 500
    found = choose_rounding(pairs, 1200.0)
    assert (found.quantum, found.most) == (pytest.approx(0.9375), 1)
    assert coded_bits([], np.array([0])) == 0


@pytest.mark.parametrize("change", [[1, -1], [2, -2, 2], [3, -3, 3, -3]])
def test_neighbours_that_cancel_out_are_no_division_by_zero(change):
    """If both of a pair took the other's sign, what is sent would be 0: that is nothing to divide by."""
    vector, mask = np.array(change, np.float32), np.ones(len(change), bool)
    shared = Shared(layout_of([mask.size], [True]), np.zeros_like(vector), mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frame = encode(vector, mask, shared, values="step")
    assert np.sign(decode(frame, shared).vector).tolist() == np.sign(change).tolist()


@given(st.lists(st.sampled_from([-2.0, -1.0, -0.25, 0.0, 0.25, 1.0, 2.0]), max_size=12), st.floats(-400, 400))
def test_every_tiny_update_has_a_rounding(numbers, room):
    values = np.array(numbers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = choose_rounding(tally(size_classes(np.abs(values)), values < 0, CENTRES.size), room)
    assert chosen.quantum > 0


def test_choices_are_checked():
    with pytest.raises(SafariError, match=r"^ratio must be finite and at least 0, got -1$"):
        Lossy(ratio=-1)
    with pytest.raises(SafariError, match=r"^ratio must be finite and at least 0, got inf$"):
        Lossy(ratio=float("inf"))
