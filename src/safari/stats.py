"""The statistics behind every number that is quoted: intervals, tests, and how steady a curve is.

Free functions on plain numbers, in double precision. SciPy would be a dependency of every run for a handful
of formulas; instead the tests hold these against it, against printed tables and against enumeration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev
from typing import Literal

import numpy as np

Alternative = Literal["two-sided", "greater", "less"]

# Up to the first number of differences all patterns of signs are enumerated; beyond it, the second number are drawn.
_EXACT_UP_TO = 16
_DRAWS = 1 << 16
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Interval:
    """A confidence interval; ends are infinite where the numbers do not bound them."""

    low: float
    high: float


@dataclass(frozen=True)
class Steadiness:
    """How a curve moves once its linear trend is taken out.

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
    mean, half = fmean(values), t_quantile((1 + level) / 2, len(values) - 1) * _error(values)
    return Interval(mean - half, mean + half)


def t_test(
    values: Sequence[float], mean: float = 0.0, alternative: Alternative = "two-sided"
) -> float | None:
    """The p-value of a t-test of the mean of `values` against `mean`; None for fewer than two values.

    Of paired differences this is the paired t-test. Values that are all equal leave no doubt: 0 or 1.
    """
    if len(values) < 2:
        return None
    gap, error = fmean(values) - mean, _error(values)
    size = max(abs(mean), *map(abs, values))
    if error <= _ROUNDING * size:
        gap = 0.0 if abs(gap) <= _ROUNDING * size else gap
        certain = {"two-sided": gap != 0, "greater": gap > 0, "less": gap < 0}
        return 0.0 if certain[alternative] else 1.0
    return _tail(gap / error, len(values) - 1, alternative)


def equivalence_test(values: Sequence[float], margin: float) -> float | None:
    """Two one-sided t-tests (TOST): small where the mean is shown to lie within ± `margin` of 0.

    >>> equivalence_test([0.1, -0.1, 0.0, 0.2, -0.2], 1.0) < 0.001
    True
    """
    above = t_test(values, -margin, "greater")
    below = t_test(values, margin, "less")
    return None if above is None or below is None else max(above, below)


def sign_flip_test(
    values: Sequence[float],
    mean: float = 0.0,
    alternative: Alternative = "two-sided",
    rng: np.random.Generator | None = None,
) -> float | None:
    """How often the mean is at least as extreme when each difference takes either sign; None without values.

    It needs no normal distribution, only symmetry. All 2ⁿ patterns up to n = 16, 65,536 drawn ones beyond, by
    `rng` (by default a fixed one: the same numbers have the same p). With n differences it cannot fall below
    2^(1−n) two-sided: 0.25 for three seeds.

    >>> sign_flip_test([1.0, 2.0, 3.0]), sign_flip_test([1.0, 2.0, 3.0], alternative="greater")
    (0.25, 0.125)
    """
    n = len(values)
    if n == 0:
        return None
    gaps = np.asarray(values, dtype=np.float64) - mean
    exact = n <= _EXACT_UP_TO
    if exact:
        signs = 1.0 - 2.0 * ((np.arange(1 << n)[:, None] >> np.arange(n)) & 1)
    else:
        generator = np.random.default_rng(0) if rng is None else rng
        signs = 1.0 - 2.0 * generator.integers(0, 2, (_DRAWS, n))
    sums, seen = signs @ gaps, float(gaps.sum())
    slack = _ROUNDING * float(np.abs(gaps).sum())
    hits = {
        "two-sided": np.abs(sums) >= abs(seen) - slack,
        "greater": sums >= seen - slack,
        "less": sums <= seen + slack,
    }[alternative].sum()
    # What was drawn is one pattern more: the one that was observed.
    return float(hits / len(sums)) if exact else float((hits + 1) / (len(sums) + 1))


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
    square = t_quantile((1 + level) / 2, n - 1) ** 2 / n
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


def t_cdf(t: float, df: float) -> float:
    """P(T ≤ t) of Student's t with `df` degrees of freedom.

    >>> round(t_cdf(2.0, 1), 6), t_cdf(0.0, 5)
    (0.852416, 0.5)
    """
    if t * t < df:  # Near 0 the other tail keeps the digits: df / (df + t²) would round to 1.
        return 0.5 + math.copysign(0.5 * _incomplete_beta(t * t / (df + t * t), 0.5, df / 2), t)
    tail = 0.5 * _incomplete_beta(df / (df + t * t), df / 2, 0.5)
    return 1 - tail if t > 0 else tail


@lru_cache(maxsize=256)
def t_quantile(p: float, df: float) -> float:
    """The t that P(T ≤ t) = p, by bisection.

    >>> round(t_quantile(0.975, 9), 6)
    2.262157
    """
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < p:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def _error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values))


def _tail(t: float, df: int, alternative: Alternative) -> float:
    if alternative == "two-sided":
        return min(1.0, 2 * t_cdf(-abs(t), df))
    return t_cdf(-t if alternative == "greater" else t, df)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    # The fraction converges fast below the mean; beyond it the other tail is the easier one.
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    value = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_0(1 + term * d, tiny)
            c = _away_from_0(1 + term / c, tiny)
            value *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return front * value / a


def _away_from_0(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny
