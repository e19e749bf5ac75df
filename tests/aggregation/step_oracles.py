"""The server optimisers as plain loops over lists, from their papers; nothing from safari.

Each takes the changes of a weight, a number a round, None for rounds in which no arrival kept it, and returns
where the weight is after each round. Such a weight is 0, and forgotten: if it comes back, it starts anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def fedavgm(start: float, changes: Sequence[float | None], beta: float, eta: float) -> list[float]:
    """Hsu et al. 2019: v = βv + Δ, w = w + ηv."""
    w, v, path = start, 0.0, []
    for change in changes:
        if change is None:
            w, v = 0.0, 0.0
        else:
            v = beta * v + change
            w += eta * v
        path.append(w)
    return path


def fedopt(
    kind: str,
    start: float,
    changes: Sequence[float | None],
    eta: float,
    beta1: float,
    beta2: float,
    tau: float,
) -> list[float]:
    """Reddi et al. 2021, Algorithm 2."""
    w, m, v, path = start, 0.0, tau * tau, []
    for change in changes:
        if change is None:
            w, m, v = 0.0, 0.0, tau * tau
            path.append(w)
            continue
        m = beta1 * m + (1 - beta1) * change
        square = change * change
        if kind == "fedadagrad":
            v += square
        elif kind == "fedadam":
            v = beta2 * v + (1 - beta2) * square
        elif v > square:
            v -= (1 - beta2) * square
        elif v < square:
            v += (1 - beta2) * square
        w += eta * m / (math.sqrt(v) + tau)
        path.append(w)
    return path


def ghbm(start: float, changes: Sequence[float | None], tau: int, beta: float) -> list[float]:
    """Zaccone et al. 2025: the weight moves on by β/τ of its way over the last τ rounds."""
    path, since = [start], 0
    for t, change in enumerate(changes):
        w = path[-1]
        if change is None:
            path.append(0.0)
            since = t + 1
        else:
            path.append(w + change + beta / tau * (w - path[max(since, t - tau)]))
    return path[1:]
