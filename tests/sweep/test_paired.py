"""Paired comparisons by hand: differences, the best arm, those not shown to be behind."""

from __future__ import annotations

import math
from typing import Any

import pytest

from safari.sweep.paired import paired, standings


def trials(*top1: float | None) -> dict[int, dict[str, Any]]:
    return {seed: {"top1": value, "loss": value} for seed, value in enumerate(top1)}


def marks(
    arms: dict[str, dict[int, dict[str, Any]]], name: str = "top1", unranked: tuple[str, ...] = ()
) -> dict[str, str]:
    return {arm: "" if s is None else s.mark for arm, s in standings(arms, name, unranked).items()}


def test_a_difference_is_seed_by_seed() -> None:
    gap = paired(trials(0.5, 0.7, 0.9), trials(0.4, 0.5, 0.6), "top1")
    assert gap is not None
    assert gap.mean == pytest.approx(0.2)
    assert gap.error == pytest.approx(0.1 / math.sqrt(3))
    assert gap.n == 3
    # t of 4.3027 with two degrees of freedom.
    assert gap.interval is not None
    assert gap.interval.low == pytest.approx(0.2 - 4.3027 * 0.1 / math.sqrt(3), abs=1e-5)
    # With two degrees of freedom P(|T| > t) = 1 - t / sqrt(2 + t²), here of t = 2 √3.
    assert gap.p == pytest.approx(1 - math.sqrt(12 / 14))


def test_only_seeds_that_both_have_count() -> None:
    gap = paired({1: {"top1": 0.5}, 2: {"top1": 0.9}}, {0: {"top1": 0.0}, 1: {"top1": 0.25}}, "top1")
    assert gap is not None
    assert (gap.mean, gap.error, gap.n, gap.p) == (0.25, None, 1, None)
    assert paired(trials(0.5), trials(None), "top1") is None


def test_marks_are_tests_with_a_correction() -> None:
    found = marks(
        {
            "first": trials(0.60, 0.80, 0.70),
            # Behind by 0.1, -0.1 and 0.1: 0.033 on average, with a standard error of 0.067.
            "level": trials(0.50, 0.90, 0.60),
            # Behind by 0.010, 0.011 and 0.009: little, but sure.
            "behind": trials(0.590, 0.789, 0.691),
            # Behind by 0.03, 0.05, 0.04: p 0.02 alone, 0.04 of two; of the three tests it is the second.
            "second": trials(0.57, 0.75, 0.66),
            "oracle": trials(0.9, 0.9, 0.9),
            "young": trials(0.99),
        },
        unranked=("oracle",),
    )
    assert found == {
        "first": "best", "level": "level", "behind": "", "second": "", "oracle": "", "young": ""
    }  # fmt: skip


def test_less_is_better_for_a_loss() -> None:
    found = marks({"low": trials(0.1, 0.2, 0.3), "high": trials(0.5, 0.61, 0.7)}, "loss")
    assert found == {"low": "best", "high": ""}


def test_one_seed_has_a_best_and_no_test() -> None:
    assert marks({"a": trials(0.5), "b": trials(0.5)}) == {"a": "best", "b": ""}
    assert marks({"a": {}, "b": {}}) == {"a": "", "b": ""}


def test_a_standing_has_the_gap_to_the_best_and_its_test() -> None:
    found = standings({"one": trials(0.4, 0.5), "two": trials(0.8, 0.9), "gone": {}}, "top1", ("gone",))
    one = found["one"]
    assert found["gone"] is None
    assert one is not None
    assert one.behind is not None
    assert (one.mean, one.behind.mean, one.n) == (pytest.approx(0.45), pytest.approx(0.4), 2)
    assert one.interval is not None
    assert one.interval.high == pytest.approx(0.45 + 12.706 * 0.05, abs=1e-4)
    assert one.p == 0.0, "the same gap in both seeds"
