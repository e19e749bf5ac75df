"""FedAvgM: momentum at the server.

Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019 (arXiv:1909.06335). With Δ the change that the weighted sum gave:

    v ← β v + Δ
    x ← x + η v             (Nesterov: x + η (β v + Δ))

The paper has η = 1. A long run of equal steps is 1 / (1 - β) times as fast as without momentum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from safari.aggregation.compensation import Round, State
from safari.aggregation.steps.step import ServerStep
from safari.bounds import above, below


def fedavgm(*, momentum: float = 0.9, lr: float = 1.0, nesterov: bool = False) -> ServerStep:
    """FedAvgM (2019): momentum at the server, v ← β v + Δ; x ← x + η v.

    `momentum`: β. `lr`: η. `nesterov`: look ahead, x ← x + η (β v + Δ).
    """
    beta, rate = below("momentum", momentum, 1), above("lr", lr, 0)

    def apply(state: State, step: Tensor, round: Round) -> tuple[Tensor, State]:
        v = torch.where(round.kept, beta * state["velocity"] + step, 0.0)
        v = round.where_heard(v, state["velocity"])
        return rate * (beta * v + step if nesterov else v), {"velocity": v}

    return ServerStep(lambda model: {"velocity": torch.zeros_like(model)}, apply)
