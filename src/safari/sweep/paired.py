"""Arms compared seed by seed: a seed fixes the data, the start and the losses of the links for all arms."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, TypeVar

from safari.stats import Interval, holm, mean_interval, t_test
from safari.sweep.numbers import COLUMNS, Numbers, is_share

# Marks and verdicts are at this level, intervals at 1 minus it.
ALPHA = 0.05
Trials = Mapping[int, Numbers]
Mark = Literal["best", "level", ""]
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Paired:
    """One arm's numbers minus another's over the seeds that both have."""

    differences: tuple[float, ...]

    @property
    def n(self) -> int:
        """Number of seeds that both have."""
        return len(self.differences)

    @property
    def mean(self) -> float:
        """The mean difference."""
        return fmean(self.differences)

    @property
    def error(self) -> float | None:
        """Standard error of the mean difference; None for one seed."""
        return stdev(self.differences) / math.sqrt(self.n) if self.n > 1 else None

    @property
    def interval(self) -> Interval | None:
        """95 % interval of the mean difference (Student's t); None for one seed."""
        return mean_interval(self.differences, 1 - ALPHA)

    @property
    def p(self) -> float | None:
        """The p-value of a paired t-test, two-sided; None for one seed."""
        return t_test(self.differences)


def paired(one: Trials, other: Trials, name: str) -> Paired | None:
    """The difference of a column, seed by seed; None where no seed has both.

    >>> found = paired({0: {"top1": 0.5}, 1: {"top1": 0.7}}, {0: {"top1": 0.4}, 1: {"top1": 0.4}}, "top1")
    >>> f"{found.mean:.2f} ± {found.error:.2f}"
    '0.20 ± 0.10'
    """
    pairs = pairs_of(one, other, name)
    return Paired(tuple(a - b for a, b in pairs)) if pairs else None


@dataclass(frozen=True)
class Standing:
    """Standing of one of several arms: the mean of its seeds, and the best arm's numbers minus its own.

    `mark`: the best by its mean; level: not shown to be behind it at 5 %, which is not the same as equal. `p` is that
    of the paired t-test against the best, after Holm's correction over all that were tested.
    """

    mean: float
    interval: Interval | None
    n: int
    mark: Mark
    behind: Paired | None
    p: float | None


def standings(
    arms: Mapping[K, Trials], name: str, unranked: Collection[K] = (), *, higher: bool | None = None
) -> dict[K, Standing | None]:
    """Standing of each arm by a column; None for an arm without a number.

    Only arms with the largest number of seeds are ranked: a mean over fewer seeds is not comparable. `higher`: more is
    better, for a column that is not one of `COLUMNS`.
    """
    sign = 1.0 if (COLUMNS[name] if higher is None else higher) else -1.0
    values = {
        arm: [t[name] for t in trials.values() if t.get(name) is not None] for arm, trials in arms.items()
    }
    most = max((len(found) for arm, found in values.items() if arm not in unranked), default=0)
    ranked = [arm for arm in arms if arm not in unranked and len(values[arm]) == most > 0]
    best = max(ranked, key=lambda arm: sign * fmean(values[arm]), default=None)
    behind = {arm: paired(arms[best], arms[arm], name) for arm in ranked if arm != best and best is not None}
    tests = {arm: gap.p for arm, gap in behind.items() if gap is not None and gap.p is not None}
    adjusted = dict(zip(tests, holm([p for p in tests.values() if p is not None]), strict=True))

    def mark(arm: K) -> Mark:
        if arm == best:
            return "best"
        return "level" if adjusted.get(arm, 0.0) > ALPHA else ""

    return {
        arm: Standing(
            fmean(found),
            mean_interval(found, 1 - ALPHA),
            len(found),
            mark(arm),
            behind.get(arm),
            adjusted.get(arm),
        )
        if found
        else None
        for arm, found in values.items()
    }


def scale(name: str) -> tuple[float, str]:
    """Factor and unit with which a column is shown: shares in per cent."""
    return (100.0, " %") if is_share(name) else (1.0, "")


def spelled(mean: float, interval: Interval | None, digits: int = 1, sign: str = "+") -> str:
    """A number with its interval.

    >>> spelled(-1.25, Interval(-2.0, -0.5)), spelled(3.0, None, 0, "")
    ('-1.2 [-2.0, -0.5]', '3')
    """
    if interval is None:
        return f"{mean:{sign}.{digits}f}"
    return f"{mean:{sign}.{digits}f} [{interval.low:{sign}.{digits}f}, {interval.high:{sign}.{digits}f}]"


def pairs_of(one: Trials, other: Trials, name: str) -> list[tuple[float, float]]:
    """A column of both, for the seeds at which both have a number."""
    return [
        (one[seed][name], other[seed][name])
        for seed in one
        if seed in other and one[seed].get(name) is not None and other[seed].get(name) is not None
    ]


def spelled_p(value: float) -> str:
    """A p-value: three digits where they matter."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"
