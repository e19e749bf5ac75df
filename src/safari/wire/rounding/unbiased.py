"""Unbiased sparsification (Wangni, Wang, Liu and Zhang 2018, their Algorithm 3).

A number `g_i` is sent with probability `p_i`, and then as `g_i / p_i`, so that it is right on average:

    p_i = min(1, λ |g_i|),      λ such that Σ p_i = k

Of all unbiased choices with `k` numbers this has the least variance. It needs no memory.
"""

from __future__ import annotations

import numpy as np

from safari.wire.layout import Bools
from safari.wire.scales import Wide

# The sum of probabilities converges in a few passes; the numbers that reach 1 only become more.
MOST_PASSES = 50


def unbiased(target: Wide, steering: int, fraction: float, rng: np.random.Generator) -> tuple[Bools, Wide]:
    """Which numbers to send, and what to say for each: of the first `steering` a random choice of about that
    fraction, and all the others as they are."""
    p = np.ones(target.size)
    p[:steering] = probabilities(np.abs(target[:steering]), fraction * steering)
    sent = rng.random(target.size) < p
    return sent, np.divide(target, p, out=np.zeros_like(target), where=sent)


def probabilities(sizes: Wide, count: float) -> Wide:
    """Probabilities in proportion to sizes, none above 1, that add up to `count` (or to all that are not 0).

    >>> probabilities(np.array([8.0, 1, 1, 0]), 2).tolist()
    [1.0, 0.5, 0.5, 0.0]
    """
    total = sizes.sum()
    if not total:
        return np.zeros_like(sizes)
    p = np.minimum(count * sizes / total, 1.0)
    for _ in range(MOST_PASSES):
        full = p >= 1
        rest = p[~full].sum()
        missing = count - np.count_nonzero(full) - rest
        if not rest or missing <= 1e-9 * count:
            break
        p = np.where(full, 1.0, np.minimum(p * (1 + missing / rest), 1.0))
    return np.asarray(p)
