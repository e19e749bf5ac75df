"""Arms held against each other, seed by seed: one seed is the same data, start and luck of the links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from safari.config import Arm
from safari.evidence.book import Book, column
from safari.evidence.checks import Check
from safari.evidence.numbers import COLUMNS, Numbers, is_share
from safari.evidence.plan import Case, Experiment

Mark = Literal["best", "tied", ""]


@dataclass(frozen=True)
class Paired:
    """The mean of one arm's numbers minus another's over the seeds that both have, and its standard error."""

    mean: float
    error: float | None
    n: int


@dataclass(frozen=True)
class Verdict:
    """What the numbers say about a check; `ours` has the figures, a text for each case."""

    check: Check
    status: Literal["confirmed", "not confirmed", "not finished"]
    ours: Mapping[str, str]


@dataclass(frozen=True)
class Cell:
    """An arm in a case of the matrix: mean, standard deviation, seeds, and how it stands."""

    mean: float
    std: float | None
    n: int
    mark: Mark


def paired(one: Mapping[int, Numbers], other: Mapping[int, Numbers], name: str) -> Paired | None:
    """The difference of a column, seed by seed; None where no seed has both.

    >>> found = paired({0: {"top1": 0.5}, 1: {"top1": 0.7}}, {0: {"top1": 0.4}, 1: {"top1": 0.4}}, "top1")
    >>> f"{found.mean:.2f} ± {found.error:.2f}"
    '0.20 ± 0.10'
    """
    differences = [
        one[seed][name] - other[seed][name]
        for seed in one
        if seed in other and one[seed].get(name) is not None and other[seed].get(name) is not None
    ]
    if not differences:
        return None
    n = len(differences)
    return Paired(fmean(differences), stdev(differences) / math.sqrt(n) if n > 1 else None, n)


def marks(
    arms: Mapping[str, Mapping[int, Numbers]], name: str = "top1", unranked: tuple[str, ...] = ()
) -> dict[str, Mark]:
    """The best arm by its mean, and those that are within one standard error of it, by paired seeds.

    The best is of those that have the most seeds: a mean over fewer is another thing.
    """
    sign = 1.0 if COLUMNS[name] else -1.0
    means = {arm: column(trials, name) for arm, trials in arms.items() if arm not in unranked}
    most = max((spread["n"] for spread in means.values()), default=0)
    whole = {arm: sign * spread["mean"] for arm, spread in means.items() if spread["n"] == most > 0}
    found: dict[str, Mark] = dict.fromkeys(arms, "")
    if not whole:
        return found
    best = max(whole, key=lambda arm: whole[arm])
    found[best] = "best"
    for arm in whole:
        behind = paired(arms[best], arms[arm], name)
        if arm != best and behind is not None and behind.error is not None:
            found[arm] = "tied" if sign * behind.mean <= behind.error else ""
    return found


def cells(
    case: Case, book: Book, name: str = "top1", unranked: tuple[str, ...] = ()
) -> dict[str, Cell | None]:
    """A column of the matrix: every arm of a case; None for an arm without a finished seed."""
    arms = {arm.name: book.arm(case, arm) for arm in case.config.arms}
    marked = marks(arms, name, unranked)
    found: dict[str, Cell | None] = {}
    for arm, trials in arms.items():
        spread = column(trials, name)
        mean = spread["mean"]
        found[arm] = None if mean is None else Cell(mean, spread["std"], spread["n"], marked[arm])
    return found


def judge(check: Check, experiment: Experiment, book: Book) -> Verdict:
    """Confirmed where every case passes, not confirmed where one fails: of the cases that have all seeds."""
    ours: dict[str, str] = {}
    passed: list[bool | None] = []
    for case in experiment.cases:
        if check.cases and case.name not in check.cases:
            continue
        names = {arm.name: arm for arm in case.config.arms}
        needed = [name for name in (check.arm, check.against) if name]
        trials = {name: book.arm(case, names[name]) if name in names else {} for name in needed}
        if check.first:
            trials = {arm.name: book.arm(case, arm) for arm in case.config.arms}
            result = _stands(check, trials, experiment.unranked)
        else:
            result = _apply(check, trials)
        if result is not None:
            ours[case.name] = result[0]
        whole = all(len(found) == case.config.seeds for found in trials.values())
        passed.append(result[1] if result is not None and whole else None)
    if False in passed:
        return Verdict(check, "not confirmed", ours)
    return Verdict(check, "not finished" if None in passed or not passed else "confirmed", ours)


def _apply(check: Check, trials: Mapping[str, Mapping[int, Numbers]]) -> tuple[str, bool] | None:
    """The figure of one case, and whether it passes; None without numbers."""
    mean = column(trials[check.arm], check.column)["mean"]
    if mean is None:
        return None
    factor, unit = scale(check.column)
    if check.at_least is not None:
        return f"{factor * mean:.4g}{unit}", mean >= check.at_least
    reference = column(trials[check.against], check.column)["mean"]
    if reference is None:
        return None
    if check.times is not None:
        return f"{mean / reference:.2f} times" if reference else "∞ times", mean <= check.times * reference
    gap = paired(trials[check.arm], trials[check.against], check.column)
    if gap is None or check.margin is None:
        return None
    error = "" if gap.error is None else f" ± {factor * gap.error:.1f}"
    towards = gap.mean if COLUMNS[check.column] else -gap.mean
    return f"{factor * gap.mean:+.1f}{error}{' points' if unit else ''}", towards >= -check.margin


def _stands(
    check: Check, trials: Mapping[str, Mapping[int, Numbers]], unranked: tuple[str, ...]
) -> tuple[str, bool] | None:
    """Whether an arm is the best or level with it; None while it is not among those that are ranked."""
    marked = marks(trials, check.column, unranked)
    best = next((arm for arm, mark in marked.items() if mark == "best"), None)
    if best is None or not trials.get(check.arm):
        return None
    gap = paired(trials[check.arm], trials[best], check.column)
    if best == check.arm or gap is None:
        return "first", best == check.arm
    factor, unit = scale(check.column)
    error = "" if gap.error is None else f" ± {factor * gap.error:.1f}"
    words = f"{factor * gap.mean:+.1f}{error}{' points' if unit else ''} to {best}"
    return words, marked[check.arm] == "tied"


def scale(name: str) -> tuple[float, str]:
    """How a column is shown: shares in per cent."""
    return (100.0, " %") if is_share(name) else (1.0, "")


def reference_of(case: Case) -> Arm | None:
    """The arm in which nothing is lost, if the case has one."""
    return next((arm for arm in case.config.arms if arm.rule.name == "perfect"), None)
