"""Sparse momentum (Dettmers & Zettlemoyer, 2019): weights come back where the smoothed gradient is largest.

m ← β · m + (1 - β) · Σ_i a_i g_i,   score of a cut weight = |m|
"""

from __future__ import annotations

from safari.bounds import below
from safari.pruning.policies.regrow import Pace
from safari.pruning.policies.rigl import by_gradient
from safari.pruning.policy import MaskPolicy


def sparse_momentum(
    *,
    interval: int = 10,
    fraction: float = 0.3,
    stop: float = 0.75,
    breadth: float = 2.0,
    beta: float = 0.5,
    stand_ins: bool = True,
) -> MaskPolicy:
    """Sparse momentum: as RigL, by a running mean of the gradients.

    `beta`: what is left of the past at each move. Layers keep their counts: the paper also moves weights between
    layers, which needs the gradient of every weight in every step. Other options as in RigL.
    """
    below("beta", beta, 1)
    pace = Pace(interval, fraction, stop)
    return by_gradient("sparse-momentum", pace, breadth, beta=beta, stand_ins=stand_ins)
