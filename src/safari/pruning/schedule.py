"""The sparsity of each round: from the first on, after a wait, or step by step.

constant  s_t = s (the paper)
wait      s_t = s_0 before round `begin`, s from then on
cubic     s_t = s + (s_0 - s) · (1 - (t - begin) / (end - begin))³ between the two rounds (Zhu & Gupta 2017)
"""

from __future__ import annotations

SCHEDULES = ("constant", "wait", "cubic")


def sparsity_at(
    t: int, sparsity: float, schedule: str = "constant", *, initial: float = 0.0, begin: int = 0, end: int = 0
) -> float:
    """The sparsity of round t (counted from 0). `initial` is s_0, the sparsity before round `begin`.

    >>> [round(sparsity_at(t, 0.8, "cubic", begin=1, end=5), 4) for t in range(7)]
    [0.0, 0.0, 0.4625, 0.7, 0.7875, 0.8, 0.8]
    >>> [sparsity_at(t, 0.8, "wait", begin=2) for t in range(4)]
    [0.0, 0.0, 0.8, 0.8]
    """
    if schedule == "constant":
        return sparsity
    if t < begin:
        return initial
    if schedule == "wait" or t >= end:
        return sparsity
    left = 1 - (t - begin) / (end - begin)
    return sparsity + (initial - sparsity) * left**3
