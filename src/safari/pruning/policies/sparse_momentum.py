"""Sparse momentum (Dettmers & Zettlemoyer 2019): weights come back where the smoothed gradient is largest."""

from __future__ import annotations

import torch
from torch import Tensor

from safari.errors import ConfigError
from safari.models import Layout
from safari.pruning.policies.regrow import Pace, regrowing
from safari.pruning.policy import MaskPolicy, MaskRound, State


def sparse_momentum(
    *,
    interval: int = 10,
    fraction: float = 0.3,
    stop: float = 0.75,
    breadth: float = 2.0,
    beta: float = 0.5,
) -> MaskPolicy:
    """Sparse momentum: as RigL, by a running mean of the gradients, m ← β·m + (1 - β)·Σ_i a_i g_i.

    `beta`: what is left of the past at each move. Layers keep their counts: the paper also moves weights
    between layers, which needs the gradient of every weight in every step. Other options as in RigL.
    """
    if not 0 <= beta < 1:
        raise ConfigError(f"beta must be at least 0 and below 1, got {beta}")

    def init(layout: Layout, device: torch.device) -> State:
        return {"momentum": torch.zeros(layout.size, device=device)}

    def growth(state: State, round: MaskRound) -> tuple[Tensor | None, State]:
        arrivals = round.arrivals
        if arrivals is None or arrivals.votes is None:
            return None, state
        mean = arrivals.weights.to(arrivals.votes) @ arrivals.votes
        momentum = torch.lerp(mean, state["momentum"], beta)
        return momentum.abs(), {**state, "momentum": momentum}

    return regrowing("sparse-momentum", Pace(interval, fraction, stop), growth, voters=breadth, init=init)
