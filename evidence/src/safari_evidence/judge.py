"""Claims judged by the numbers.

A verdict is a test, never a comparison of two means. A claim is confirmed where its opposite is rejected at
5 %, refuted where the claim itself is, and undecided otherwise. One that must hold in several cases, or
against several rivals, needs every part: the largest p-value counts, and no correction is due (an
intersection-union test). Of the claims of one experiment, and of the many ways in which one claim could
fail, Holm's correction takes care.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from safari.config import Arm
from safari.stats import (
    Interval,
    equivalence_test,
    holm,
    mean_interval,
    ratio_interval,
    sign_flip_test,
    t_test,
)
from safari.sweep import Case, Results
from safari.sweep.numbers import COLUMNS, Numbers
from safari.sweep.paired import ALPHA, Trials, pairs_of, scale, spelled, spelled_p
from safari.sweep.results import versions
from safari_evidence.checks import EVERY_RIVAL, Check
from safari_evidence.experiments import Experiment

Status = Literal["confirmed", "refuted", "undecided", "not finished"]


@dataclass(frozen=True)
class Part:
    """A claim in one case, against one rival.

    `figure` is our number with its interval. `p_wrong`: the p-value against the claim being wrong, small
    where the numbers show the claim; `p_right`: small where they refute it; `p_signs`: `p_wrong` by
    flipping signs. All are None where the seeds do not suffice for a test.
    """

    case: str
    rival: str
    figure: str
    test: str
    n: int
    p_wrong: float | None
    p_right: float | None
    p_signs: float | None

    def __str__(self) -> str:
        rival = f" against {self.rival}" if self.rival else ""
        if self.p_wrong is None:
            return f"{self.case}: {self.figure}{rival} (n = {self.n})"
        signs = "" if self.p_signs is None else f", by signs {spelled_p(self.p_signs)}"
        test = f"{self.test} p {spelled_p(self.p_wrong)}"
        return f"{self.case}: {self.figure}{rival} (n = {self.n}, {test}{signs})"


@dataclass(frozen=True)
class Verdict:
    """Outcome of a check on the numbers.

    `p` is the p-value of the claim after Holm's correction over the claims of its experiment, or that of its
    opposite if the claim is refuted; None where there is no test. `parts` has one entry a case: with several
    rivals, the one with the largest p-value. `versions`: the versions of the code that made the numbers.
    """

    check: Check
    status: Status
    p: float | None
    parts: tuple[Part, ...]
    versions: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.parts))


def judge(experiment: Experiment, results: Results) -> list[Verdict]:
    """A verdict for each check of an experiment."""
    tried = [_try(check, experiment, results) for check in experiment.checks]
    shown = _adjusted([max_or_none([part.p_wrong for part in parts]) for parts, _, _ in tried])
    refuted = _adjusted([_any([part.p_right for part in parts]) for parts, _, _ in tried])
    verdicts = []
    for check, (parts, whole, made_by), p, against in zip(
        experiment.checks, tried, shown, refuted, strict=True
    ):
        status: Status = "undecided"
        if not whole or not parts:
            status = "not finished"
        elif p is not None and p <= ALPHA:
            status = "confirmed"
        elif against is not None and against <= ALPHA:
            status, p = "refuted", against
        verdicts.append(Verdict(check, status, p, tuple(_hardest(parts)), made_by))
    return verdicts


def max_or_none(values: Sequence[float | None]) -> float | None:
    """The largest value; None where there is none, or one is unknown."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def reference_of(case: Case) -> Arm | None:
    """The arm in which nothing is lost, if the case has one."""
    return next((arm for arm in case.config.arms if arm.rule.name == "perfect"), None)


def _try(check: Check, experiment: Experiment, results: Results) -> tuple[list[Part], bool, tuple[str, ...]]:
    """The check's parts, whether all seeds of all of them are there, and the versions behind them."""
    parts, whole, made_by = list[Part](), True, set[str]()
    for case in experiment.cases:
        if not check.is_about(case.name):
            continue
        own = _arm(case, check.arm, results)
        rivals = dict(_rivals(check, case, experiment, results))
        whole = whole and all(len(t) == case.config.seeds for t in (own, *rivals.values()))
        for rival, other in rivals.items() if check.against else [("", {})]:
            part = _part(check, case.name, rival if check.against == EVERY_RIVAL else "", own, other)
            parts += [] if part is None else [part]
            whole = whole and part is not None
            made_by |= versions(own) | versions(other)
    return parts, whole, tuple(sorted(made_by))


def _rivals(
    check: Check, case: Case, experiment: Experiment, results: Results
) -> Iterator[tuple[str, Trials]]:
    if not check.against:
        return
    if check.against == EVERY_RIVAL:
        out = (check.arm, *experiment.unranked)
        for arm in case.config.arms:
            if arm.name not in out:
                yield arm.name, results.arm(case, arm)
        return
    place, _, name = check.against.rpartition("/")
    where = next(c for c in experiment.cases if c.name == place) if place else case
    yield check.against, _arm(where, name, results)


def _arm(case: Case, name: str, results: Results) -> dict[int, Numbers]:
    arm = next((arm for arm in case.config.arms if arm.name == name), None)
    return {} if arm is None else results.arm(case, arm)


def _part(check: Check, case: str, rival: str, own: Trials, other: Trials) -> Part | None:
    """One case and rival; None without numbers."""
    name = check.column
    factor, unit = scale(name)
    if check.at_least is not None:
        values = [t[name] for t in own.values() if t.get(name) is not None]
        if not values:
            return None
        figure = spelled(factor * fmean(values), _times(mean_interval(values), factor), sign="") + unit
        return _one_sided(case, rival, figure, values, check.at_least)
    pairs = pairs_of(own, other, name)
    if not pairs:
        return None
    if check.times is not None:
        return _ratio(case, rival, pairs, check.times)
    sign = 1.0 if COLUMNS[name] else -1.0
    gaps = [a - b for a, b in pairs]
    figure = spelled(factor * fmean(gaps), _times(mean_interval(gaps), factor)) + (" points" if unit else "")
    if check.within is not None:
        return _equivalence(case, rival, figure, gaps, check.within)
    return _one_sided(case, rival, figure, [sign * gap for gap in gaps], -(check.margin or 0.0))


def _one_sided(case: str, rival: str, figure: str, values: Sequence[float], bound: float) -> Part:
    return Part(
        case,
        rival,
        figure,
        "one-sided t-test",
        len(values),
        t_test(values, bound, "greater"),
        t_test(values, bound, "less"),
        sign_flip_test(values, bound, "greater") if len(values) > 1 else None,
    )


def _equivalence(case: str, rival: str, figure: str, gaps: Sequence[float], margin: float) -> Part:
    below, above = t_test(gaps, -margin, "less"), t_test(gaps, margin, "greater")
    signs = (sign_flip_test(gaps, -margin, "greater"), sign_flip_test(gaps, margin, "less"))
    return Part(
        case,
        rival,
        figure,
        "two one-sided t-tests",
        len(gaps),
        equivalence_test(gaps, margin),
        None if below is None or above is None else min(1.0, 2 * min(below, above)),
        max_or_none(signs) if len(gaps) > 1 else None,
    )


def _ratio(case: str, rival: str, pairs: Sequence[tuple[float, float]], times: float) -> Part:
    above, below = [a for a, _ in pairs], [b for _, b in pairs]
    ratio = fmean(above) / fmean(below) if fmean(below) else math.inf
    figure = spelled(ratio, ratio_interval(above, below), digits=2, sign="") + " times"
    contrast = [times * b - a for a, b in pairs]
    return _one_sided(case, rival, figure, contrast, 0.0)


def _hardest(parts: Sequence[Part]) -> Iterator[Part]:
    """Weakest part of each case: the one that supports the claim least."""
    key: Callable[[Part], float] = lambda part: 1.0 if part.p_wrong is None else part.p_wrong
    for case in dict.fromkeys(part.case for part in parts):
        yield max((part for part in parts if part.case == case), key=key)


def _any(values: Sequence[float | None]) -> float | None:
    """The p-value of "at least one of these", by Holm's correction; None where none is known."""
    known = [value for value in values if value is not None]
    return min(holm(known)) if known else None


def _adjusted(values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction over what is known."""
    known = iter(holm([value for value in values if value is not None]))
    return [None if value is None else next(known) for value in values]


def _times(interval: Interval | None, factor: float) -> Interval | None:
    return None if interval is None else Interval(factor * interval.low, factor * interval.high)
