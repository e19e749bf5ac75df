"""The statistics against printed tables, closed forms, enumeration, and sums that can be checked by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy

from safari.stats import (
    Interval,
    equivalence_test,
    holm,
    mean_interval,
    ratio_interval,
    sign_flip_test,
    steadiness,
    t_test,
)

DIFFERENCES = [0.8, -0.3, 1.9, 0.4, 2.2, 0.1, -0.7, 1.2, 0.6, 1.5]


# --- intervals and tests of a mean


@pytest.mark.parametrize(
    ("n", "level", "printed"),
    # Any textbook's table of Student's t, two-sided.
    [(2, 0.95, 12.706), (3, 0.95, 4.303), (5, 0.95, 2.776), (10, 0.95, 2.262), (10, 0.90, 1.833)],
)
def test_half_an_interval_is_the_printed_quantile_times_the_standard_error(
    n: int, level: float, printed: float
) -> None:
    values = DIFFERENCES[:n]
    found = mean_interval(values, level)
    assert found is not None
    error = math.sqrt(sum((x - sum(values) / n) ** 2 for x in values) / (n - 1) / n)
    assert (found.high - found.low) / 2 / error == pytest.approx(printed, abs=6e-4)
    assert (found.high + found.low) / 2 == pytest.approx(sum(values) / n)


def test_a_t_test_is_the_closed_form_at_two_degrees_of_freedom() -> None:
    # t of [1, 2, 4] is 7/3 / sqrt(7/3 / 3); with 2 degrees of freedom P(|T| > t) = 1 - t / sqrt(2 + t²).
    t = 7 / 3 / math.sqrt(7 / 9)
    assert t_test([1.0, 2.0, 4.0]) == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert t_test([1.0, 2.0, 4.0], alternative="greater") == pytest.approx((1 - t / math.sqrt(2 + t * t)) / 2)


def test_small_tails_keep_their_digits() -> None:
    """A p-value of 1e-12 is not 0: Holm multiplies it by the number of tests."""
    p = t_test([1.0, 1.001] * 5)
    assert p is not None
    assert 0 < p < 1e-20


def test_values_that_are_all_equal_leave_no_doubt() -> None:
    assert t_test([0.3] * 3) == 0.0
    assert t_test([0.3] * 3, 0.3) == 1.0
    assert t_test([0.3] * 3, 0.1, "greater") == 0.0
    assert t_test([0.3] * 3, 0.1, "less") == 1.0
    assert t_test([0.0] * 3) == 1.0


def test_one_value_has_no_interval_and_no_test() -> None:
    assert mean_interval([0.5]) is None
    assert t_test([0.5]) is None
    assert equivalence_test([0.5], 1.0) is None
    assert ratio_interval([0.5], [1.0]) is None
    assert sign_flip_test([0.5]) is None


def test_an_interval_covers_as_often_as_it_says() -> None:
    draws = np.random.default_rng(1).normal(0.0, 1.0, (2000, 3))
    inside = [i.low <= 0 <= i.high for i in map(mean_interval, draws.tolist()) if i is not None]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.015)


def test_equivalence_is_two_one_sided_tests() -> None:
    values = [0.2, -0.1, 0.3, 0.1, -0.2]
    upper = scipy.ttest_1samp(values, 0.5, alternative="less").pvalue
    lower = scipy.ttest_1samp(values, -0.5, alternative="greater").pvalue
    assert equivalence_test(values, 0.5) == pytest.approx(max(upper, lower))
    # No difference seen is not the same as equivalence shown.
    noisy = [3.0, -3.1, 0.2]
    assert t_test(noisy) == pytest.approx(1.0, abs=0.05)
    assert equivalence_test(noisy, 0.5) == pytest.approx(0.41, abs=0.02)


def test_equivalence_at_5_percent_is_the_90_percent_interval_inside_the_margin() -> None:
    found = mean_interval(DIFFERENCES, 0.90)
    assert found is not None
    for margin in np.linspace(0.1, 3, 30):
        p = equivalence_test(DIFFERENCES, float(margin))
        assert p is not None
        assert (p <= 0.05) == (-margin <= found.low and found.high <= margin)


# --- signs


def enumerated(values: list[float], alternative: str) -> float:
    seen = sum(values)
    sums = [
        sum(s * v for s, v in zip(signs, values, strict=True))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    hits = {
        "two-sided": [abs(s) >= abs(seen) - 1e-9 for s in sums],
        "greater": [s >= seen - 1e-9 for s in sums],
        "less": [s <= seen + 1e-9 for s in sums],
    }[alternative]
    return sum(hits) / len(hits)


@given(
    st.lists(st.integers(-9, 9).map(float), min_size=2, max_size=7),
    st.sampled_from(["two-sided", "greater", "less"]),
)
def test_signs_are_flipped_in_every_way(values: list[float], alternative: str) -> None:
    assert sign_flip_test(values, alternative=alternative) == enumerated(values, alternative)  # type: ignore[arg-type]


def test_three_seeds_cannot_be_sure() -> None:
    assert sign_flip_test([5.0, 6.0, 7.0]) == 0.25
    assert sign_flip_test([5.0] * 5) == 2 / 32
    assert sign_flip_test([5.0] * 10) == 2 / 1024


def test_a_shifted_mean_is_tested_after_the_shift() -> None:
    assert sign_flip_test([1.0, 2.0, 4.0], mean=1.0) == sign_flip_test([0.0, 1.0, 3.0])


def test_many_values_are_drawn_and_near_the_exact_test() -> None:
    values = np.random.default_rng(3).normal(0.4, 1.0, 17).round(3).tolist()
    drawn = sign_flip_test(values)
    assert drawn == pytest.approx(enumerated(values, "two-sided"), abs=0.006)
    assert drawn == sign_flip_test(values)


# --- ratios


def test_a_ratio_lies_in_the_interval_where_its_own_test_does_not_reject() -> None:
    a, b = [2.2, 3.9, 6.3, 4.1], [1.0, 2.1, 2.9, 2.2]
    found = ratio_interval(a, b)
    assert found is not None
    for k, inside in (
        (found.low - 1e-6, False),
        (found.low + 1e-6, True),
        (found.high - 1e-6, True),
        (found.high + 1e-6, False),
    ):
        p = scipy.ttest_1samp([x - k * y for x, y in zip(a, b, strict=True)], 0.0).pvalue
        assert (p > 0.05) == inside


def test_a_ratio_to_what_may_be_0_is_unbounded() -> None:
    assert ratio_interval([1.0, 2.0], [1.0, -1.0]) == Interval(-math.inf, math.inf)


# --- many comparisons


def test_holm_by_hand() -> None:
    # Sorted: 0.005 × 4, 0.01 × 3, 0.03 × 2, 0.04 × 1, each at least the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.6, 0.9]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_is_between_no_correction_and_bonferroni(p_values: list[float]) -> None:
    found = holm(p_values)
    assert all(p <= q <= min(1.0, len(p_values) * p) + 1e-15 for p, q in zip(p_values, found, strict=True))
    order = sorted(range(len(p_values)), key=lambda k: p_values[k])
    assert [found[k] for k in order] == sorted(found)


# --- steadiness


def test_trend_and_parity_are_taken_out() -> None:
    rounds = list(range(751, 1001, 7))
    noise = np.random.default_rng(0).normal(0, 0.01, len(rounds))
    drift = [
        0.5 + 0.0002 * (r - 751) + (0.02 if r % 2 == 0 else -0.02) + e
        for r, e in zip(rounds, noise, strict=True)
    ]
    found, plain = steadiness(rounds, drift), steadiness(rounds, noise.tolist())
    assert found is not None
    assert plain is not None
    assert found.wobble == pytest.approx(plain.wobble, rel=1e-9)
    assert found.wobble == pytest.approx(0.01, rel=0.3)
    assert found.alternation == pytest.approx(0.04 + plain.alternation, rel=1e-9)
    assert found.t is not None
    assert found.t > 5


def test_the_fit_is_that_of_least_squares() -> None:
    rounds, scores = [3, 4, 7, 10, 11, 16], [0.1, 0.5, 0.2, 0.8, 0.3, 0.9]
    design = np.stack([np.ones(6), rounds, [0 if r % 2 else 1 for r in rounds]], axis=1)
    _, squares, _, _ = np.linalg.lstsq(design, np.array(scores), rcond=None)
    found = steadiness(rounds, scores)
    assert found is not None
    assert found.wobble == pytest.approx(math.sqrt(float(squares[0]) / 3))
    assert found.alternation == pytest.approx(np.linalg.lstsq(design, np.array(scores), rcond=None)[0][2])


def test_one_phase_alone_has_a_wobble_and_no_alternation() -> None:
    found = steadiness([10, 20, 30, 40], [0.1, 0.3, 0.2, 0.4])
    assert found is not None
    assert (found.alternation, found.t) == (None, None)
    slope = scipy.linregress([10, 20, 30, 40], [0.1, 0.3, 0.2, 0.4])
    left = [
        y - slope.intercept - slope.slope * x
        for x, y in zip([10, 20, 30, 40], [0.1, 0.3, 0.2, 0.4], strict=True)
    ]
    assert found.wobble == pytest.approx(math.sqrt(sum(e * e for e in left) / 2))


@pytest.mark.parametrize("rounds", [[], [5], [5, 6], [5, 6, 7], [10, 20], [6, 6, 6, 6]])
def test_too_few_evaluations_give_no_number(rounds: list[int]) -> None:
    assert steadiness(rounds, [0.5] * len(rounds)) is None
