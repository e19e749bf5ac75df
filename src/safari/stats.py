"""The statistics behind every number that is quoted: intervals, tests, and how steady a curve is.

Free functions on plain numbers, in double precision. Every run has the steadiness of its curves; the others, which
compare runs, need SciPy (extra: stats).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np

from safari.errors import MissingExtraError

Alternative = Literal["two-sided", "greater", "less"]

# As many patterns of signs are looked at: all of them up to 16 differences, and so many drawn ones beyond.
_PATTERNS = 1 << 16
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Interval:
    """A confidence interval; ends are infinite where the numbers do not bound them."""

    low: float
    high: float


@dataclass(frozen=True)
class Steadiness:
    """Fluctuation of a curve around its linear trend.

    wobble: the standard deviation of what is left, with parity taken out, too. alternation: mean of the even
    rounds minus that of the odd ones; None where only one of the two was tested. t: its t statistic.
    """

    wobble: float
    alternation: float | None
    t: float | None


def steadiness(rounds: Sequence[int], scores: Sequence[float]) -> Steadiness | None:
    """Fit score = a + b·round + c·(+½ in even rounds, −½ in odd ones) by least squares; None if too few.

    A model that learns drifts within the window, and one that alternates from round to round would look as
    unsteady as one that jumps at random: neither is noise. The standard deviation has the fit's degrees of
    freedom, n − 3 (n − 2 where all rounds have one parity).

    >>> round(steadiness([1, 2, 3, 4, 5, 6], [0.1, 0.4, 0.3, 0.6, 0.5, 0.8]).wobble, 9)
    0.0
    >>> round(steadiness([1, 2, 3, 4, 5, 6], [0.1, 0.4, 0.3, 0.6, 0.5, 0.8]).alternation, 9)
    0.2
    """
    t, y = np.asarray(rounds, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    even = np.asarray(rounds, dtype=np.int64) % 2 == 0
    columns = [np.ones(len(t)), t - t.mean() if len(t) else t]
    both = bool(even.any() and not even.all())
    if both:
        columns.append(np.where(even, 0.5, -0.5))
    design = np.stack(columns, axis=1)
    spare = len(t) - design.shape[1]
    if spare < 1 or np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    inverse = np.linalg.inv(design.T @ design)
    fit = inverse @ design.T @ y
    residual = y - design @ fit
    variance = float(residual @ residual) / spare
    if not both:
        return Steadiness(math.sqrt(variance), None, None)
    effect, error = float(fit[2]), math.sqrt(variance * float(inverse[2, 2]))
    return Steadiness(math.sqrt(variance), effect, effect / error if error > 0 else None)


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval | None:
    """Student's t interval for the mean; None for fewer than two values.

    >>> found = mean_interval([1.0, 2.0, 3.0])
    >>> f"{found.low:.3f} to {found.high:.3f}"
    '-0.484 to 4.484'
    """
    if len(values) < 2:
        return None
    half = float(_scipy().t.ppf((1 + level) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return Interval(fmean(values) - half, fmean(values) + half)


def t_test(
    values: Sequence[float], mean: float = 0.0, alternative: Alternative = "two-sided"
) -> float | None:
    """The p-value of a t-test of the mean of `values` against `mean`; None for fewer than two values.

    Of paired differences this is the paired t-test. Values that are all equal leave no doubt: 0 or 1.
    """
    if len(values) < 2:
        return None
    gap, size = fmean(values) - mean, max(abs(mean), *map(abs, values))
    if stdev(values) <= _ROUNDING * size * math.sqrt(len(values)):
        gap = 0.0 if abs(gap) <= _ROUNDING * size else gap
        certain = {"two-sided": gap != 0, "greater": gap > 0, "less": gap < 0}
        return 0.0 if certain[alternative] else 1.0
    return float(_scipy().ttest_1samp(values, mean, alternative=alternative).pvalue)


def two_means(
    above: Sequence[float], below: Sequence[float], level: float = 0.95
) -> tuple[Interval | None, float | None]:
    """Welch's interval for mean(above) − mean(below), and the two-sided p-value; None for fewer than two values each.

    >>> found, p = two_means([3.0, 4.0, 5.0], [1.0, 2.0, 3.0])
    >>> f"{found.low:.3f} to {found.high:.3f}, p {p:.4f}"
    '-0.267 to 4.267, p 0.0705'
    """
    if min(len(above), len(below)) < 2:
        return None, None
    found = _scipy().ttest_ind(above, below, equal_var=False)
    ends = found.confidence_interval(level)
    return Interval(float(ends.low), float(ends.high)), float(found.pvalue)


def equivalence_test(values: Sequence[float], margin: float) -> float | None:
    """Two one-sided t-tests (TOST): small where the mean is shown to lie within ± `margin` of 0.

    >>> equivalence_test([0.1, -0.1, 0.0, 0.2, -0.2], 1.0) < 0.001
    True
    """
    above = t_test(values, -margin, "greater")
    below = t_test(values, margin, "less")
    return None if above is None or below is None else max(above, below)


def sign_flip_test(
    values: Sequence[float], mean: float = 0.0, alternative: Alternative = "two-sided"
) -> float | None:
    """P-value of the sign-flip permutation test of a mean; None for fewer than two values.

    The p-value is the share of sign patterns under which the mean is at least as extreme. The test needs no
    normal distribution, only symmetry. All 2ⁿ patterns up to n = 16, 65,536 drawn ones beyond, always
    the same. With n differences it cannot fall below 2^(1−n) two-sided: 0.25 for three seeds.

    >>> sign_flip_test([1.0, 2.0, 3.0]), sign_flip_test([1.0, 2.0, 3.0], alternative="greater")
    (0.25, 0.125)
    """
    if len(values) < 2:
        return None
    gaps = np.asarray(values, dtype=np.float64) - mean
    found = _scipy().permutation_test(
        (gaps,),
        lambda x, axis: x.sum(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=_PATTERNS,
        batch=_PATTERNS // 16,
        alternative=alternative,
        random_state=np.random.default_rng(0),
    )
    return float(found.pvalue)


def ratio_interval(above: Sequence[float], below: Sequence[float], level: float = 0.95) -> Interval | None:
    """Fieller's interval for mean(above) / mean(below), of pairs; None for fewer than two.

    All ratios k for which a paired t-test does not tell above − k·below from 0. Where the mean of `below`
    cannot be told from 0, nothing bounds the ratio.

    >>> found = ratio_interval([2.0, 2.2, 1.9], [1.0, 1.1, 0.9])
    >>> f"{found.low:.3f} to {found.high:.3f}"
    '1.909 to 2.228'
    """
    n = len(above)
    if n < 2:
        return None
    a, b = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    cover = np.cov(a, b)
    square = float(_scipy().t.ppf((1 + level) / 2, n - 1)) ** 2 / n
    # (ā − k b̄)² ≤ square · var(a − k b), as q2·k² + q1·k + q0 ≤ 0.
    q2 = b.mean() ** 2 - square * cover[1, 1]
    q1 = -2 * (a.mean() * b.mean() - square * cover[0, 1])
    q0 = a.mean() ** 2 - square * cover[0, 0]
    if q2 <= 0:
        return Interval(-math.inf, math.inf)
    root = math.sqrt(max(0.0, float(q1 * q1 - 4 * q2 * q0)))
    return Interval(float((-q1 - root) / (2 * q2)), float((-q1 + root) / (2 * q2)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: compare each with the level that the whole family is to have.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, k in enumerate(sorted(range(len(p_values)), key=lambda k: p_values[k])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[k]))
        adjusted[k] = largest
    return adjusted


def _scipy() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise MissingExtraError("scipy", "stats", "intervals and tests") from error
    return stats
