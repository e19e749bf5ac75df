"""Paired comparisons by hand: who is best, who is level with it, which claims hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from evidence.kit import TINY, write
from safari.evidence import Book, Experiment, find, read
from safari.evidence.compare import cells, judge, marks, paired
from safari.evidence.numbers import maker_of
from safari.evidence.plan import digest


def trials(*top1: float | None) -> dict[int, dict[str, Any]]:
    return {seed: {"top1": value, "loss": value} for seed, value in enumerate(top1)}


def book_of(experiment: Experiment, **arms: list[float]) -> Book:
    """A book in which every case has these scores, a seed each."""
    cases = {}
    for case in experiment.cases:
        entries = {
            arm.name: {
                **maker_of(arm),
                "seeds": {str(s): {"top1": v, "top1_within": v / 10} for s, v in enumerate(arms[arm.name])},
            }
            for arm in case.config.arms
            if arm.name in arms
        }
        cases[case.name] = {"setting": digest(case.config)[:12], "arms": entries}
    return Book({experiment.name: {"cases": cases}}, [])


def experiment_with(folder: Path, check: str) -> Experiment:
    text = TINY.partition("[[checks]]")[0] + f'[[checks]]\nsays = "so"\narm = "safari"\n{check}'
    (experiment,) = read(find(write(folder, tiny=text)))
    return experiment


def test_a_difference_is_seed_by_seed() -> None:
    gap = paired(trials(0.5, 0.7, 0.9), trials(0.4, 0.5, 0.6), "top1")
    assert gap is not None
    assert gap.mean == pytest.approx(0.2)
    assert gap.error == pytest.approx(0.1 / math.sqrt(3))
    assert gap.n == 3


def test_only_seeds_that_both_have_count() -> None:
    gap = paired({1: {"top1": 0.5}, 2: {"top1": 0.9}}, {0: {"top1": 0.0}, 1: {"top1": 0.25}}, "top1")
    assert gap is not None
    assert (gap.mean, gap.error, gap.n) == (0.25, None, 1)
    assert paired(trials(0.5), trials(None), "top1") is None


def test_level_with_the_best_is_within_one_standard_error_of_the_difference() -> None:
    found = marks(
        {
            "first": trials(0.6, 0.8, 0.7),
            # Behind by 0.1, -0.1 and 0.1: 0.033 on average, with a standard error of 0.067.
            "level": trials(0.5, 0.9, 0.6),
            # Behind by 0.01 each time: little, but sure.
            "behind": trials(0.59, 0.79, 0.69),
            "oracle": trials(0.9, 0.9, 0.9),
            "young": trials(0.99),
        },
        unranked=("oracle",),
    )
    assert found == {"first": "best", "level": "tied", "behind": "", "oracle": "", "young": ""}


def test_less_is_better_for_a_loss() -> None:
    assert marks({"low": trials(0.1, 0.2), "high": trials(0.5, 0.7)}, "loss") == {"low": "best", "high": ""}


def test_one_seed_has_a_best_and_nobody_level_with_it() -> None:
    assert marks({"a": trials(0.5), "b": trials(0.5)}) == {"a": "best", "b": ""}
    assert marks({"a": {}, "b": {}}) == {"a": "", "b": ""}


def test_cells_have_an_entry_for_every_arm(tmp_path: Path) -> None:
    experiment = experiment_with(tmp_path, 'against = "perfect"\nmargin = 0.1')
    book = book_of(experiment, drop=[0.4, 0.5], perfect=[0.8, 0.9])
    found = cells(experiment.cases[0], book, unranked=("perfect",))
    assert found["safari"] is None
    drop = found["drop"]
    assert drop is not None
    assert (drop.mean, drop.n, drop.mark) == (pytest.approx(0.45), 2, "best")
    assert found["perfect"] is not None
    assert found["perfect"].mark == ""


@pytest.mark.parametrize(
    ("check", "status", "figure"),
    [
        ('against = "perfect"\nmargin = 0.1', "confirmed", "-9.0 ± 1.0 points"),
        ('against = "perfect"\nmargin = 0.08', "not confirmed", "-9.0 ± 1.0 points"),
        ("at_least = 0.55", "confirmed", "56 %"),
        ("at_least = 0.57", "not confirmed", "56 %"),
        ('column = "top1_within"\nagainst = "drop"\ntimes = 2.0', "confirmed", "1.40 times"),
        ('column = "top1_within"\nagainst = "drop"\ntimes = 1.3', "not confirmed", "1.40 times"),
    ],
)
def test_a_check_is_arithmetic(tmp_path: Path, check: str, status: str, figure: str) -> None:
    experiment = experiment_with(tmp_path, check)
    book = book_of(experiment, perfect=[0.6, 0.7], drop=[0.4, 0.4], safari=[0.5, 0.62])
    verdict = judge(experiment.checks[0], experiment, book)
    assert verdict.status == status
    assert verdict.ours == {"mag": figure, "rand": figure}


def test_a_check_without_its_arm_is_not_finished(tmp_path: Path) -> None:
    (experiment,) = read(find(write(tmp_path)), [("arms", ["safari"])])
    verdict = judge(experiment.checks[0], experiment, book_of(experiment, safari=[0.5, 0.62]))
    assert (verdict.status, verdict.ours) == ("not finished", {})


@pytest.mark.parametrize(
    ("drop", "status", "figure"),
    [
        ([0.4, 0.4], "confirmed", "first"),
        # Ahead by 0.02 and behind by 0.01: 0.005 on average, with a standard error of 0.015.
        ([0.52, 0.61], "confirmed", "-0.5 ± 1.5 points to drop"),
        ([0.52, 0.65], "not confirmed", "-2.5 ± 0.5 points to drop"),
    ],
)
def test_first_is_best_or_level_with_it(tmp_path: Path, drop: list[float], status: str, figure: str) -> None:
    experiment = experiment_with(tmp_path, "first = true")
    book = book_of(experiment, perfect=[0.9, 0.9], drop=drop, safari=[0.5, 0.62])
    verdict = judge(experiment.checks[0], experiment, book)
    assert (verdict.status, verdict.ours) == (status, {"mag": figure, "rand": figure})


def test_a_claim_is_not_confirmed_before_every_seed_is_there(tmp_path: Path) -> None:
    experiment = experiment_with(tmp_path, "at_least = 0.5")
    good, bad = book_of(experiment, safari=[0.9]), book_of(experiment, safari=[0.1])
    assert judge(experiment.checks[0], experiment, good).status == "not finished"
    assert judge(experiment.checks[0], experiment, bad).status == "not finished"


def test_a_check_of_some_cases_looks_at_those_alone(tmp_path: Path) -> None:
    experiment = experiment_with(tmp_path, 'at_least = 0.5\ncases = ["rand"]')
    verdict = judge(experiment.checks[0], experiment, book_of(experiment, safari=[0.5, 0.7]))
    assert list(verdict.ours) == ["rand"]
