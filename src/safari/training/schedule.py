"""The local learning rate of each round.

constant      η_t = η
cosine        η_t = η_end + (η - η_end) / 2 · (1 + cos(π · t / T))
steps         η_t = η · factor^(how many of the milestones are past)
inverse-sqrt  η_t = η / √(1 + t / horizon)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LR_SCHEDULES = ("constant", "cosine", "steps", "inverse-sqrt")


def lr_at(
    t: int,
    rounds: int,
    lr: float,
    schedule: str = "constant",
    *,
    end: float = 0.0,
    milestones: Sequence[float] = (0.5, 0.75),
    factor: float = 0.1,
    horizon: int = 10,
) -> float:
    """The learning rate of round t (counted from 0) of `rounds`.

    `end`: the fraction of `lr` at which a cosine ends. `milestones`: parts of the run after which the rate is
    multiplied by `factor`. `horizon`: rounds after which inverse-sqrt is down to lr / √2.

    >>> [round(lr_at(t, 4, 1.0, "cosine"), 3) for t in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    >>> [lr_at(t, 4, 1.0, "steps", milestones=[0.5], factor=0.25) for t in range(4)]
    [1.0, 1.0, 0.25, 0.25]
    >>> [round(lr_at(t, 99, 1.0, "inverse-sqrt"), 3) for t in (0, 10, 30)]
    [1.0, 0.707, 0.5]
    """
    if schedule == "cosine":
        return lr * (end + (1 - end) / 2 * (1 + math.cos(math.pi * t / rounds)))
    if schedule == "steps":
        return lr * factor ** sum(t >= part * rounds for part in milestones)
    if schedule == "inverse-sqrt":
        return lr / math.sqrt(1 + t / horizon)
    return lr
