"""FedAdagrad, FedYogi and FedAdam: adaptive steps at the server.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021 (arXiv:2003.00295), Algorithm 2. With Δ the change
that the weighted sum gave, coordinate by coordinate:

    m ← β₁ m + (1 - β₁) Δ
    v ← v + Δ²                                 (FedAdagrad)
    v ← v - (1 - β₂) Δ² sign(v - Δ²)           (FedYogi)
    v ← β₂ v + (1 - β₂) Δ²                     (FedAdam)
    x ← x + η m / (√v + τ)

from m = 0 and v = τ². As published there is no bias correction: the first change has a weight of 1 - β₁, and
v starts at τ² rather than at 0. Defaults are the paper's (β₁ = 0 for FedAdagrad), but for η, which has
to be tuned to the task.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from safari.aggregation.compensation import Round, State
from safari.aggregation.steps.step import ServerStep
from safari.bounds import above, below, within


def fedadagrad(*, lr: float = 0.01, beta1: float = 0.0, tau: float = 0.001) -> ServerStep:
    """FedAdagrad (2021): x ← x + η m / (√v + τ), v the sum of all squared changes.

    `lr`: η. `beta1`: momentum of m. `tau`: how far the adaptivity goes; also √v at the start.
    """
    return _adaptive(lambda v, square: v + square, lr, beta1, tau)


def fedyogi(*, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 0.001) -> ServerStep:
    """FedYogi (2021): as fedadam, but v changes by at most (1 - β₂) Δ² in a round.

    `lr`: η. `beta1`: momentum of m. `beta2`: of v. `tau`: how far the adaptivity goes; also √v at the start.
    """
    rest = 1 - below("beta2", beta2, 1)
    return _adaptive(lambda v, square: v - rest * square * torch.sign(v - square), lr, beta1, tau)


def fedadam(*, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 0.001) -> ServerStep:
    """FedAdam (2021): x ← x + η m / (√v + τ), m and v running means of the change and its square.

    `lr`: η. `beta1`: momentum of m. `beta2`: of v. `tau`: how far the adaptivity goes; also √v at the start.
    """
    beta = below("beta2", beta2, 1)
    return _adaptive(lambda v, square: beta * v + (1 - beta) * square, lr, beta1, tau)


# Of τ in float32: its square is finite, and it is not 0 itself.
_LEAST, _MOST = 1e-30, 1e18


def _adaptive(second: Callable[[Tensor, Tensor], Tensor], lr: float, beta1: float, tau: float) -> ServerStep:
    """The three in one; `second(v, Δ²)` is the next v."""
    rate, beta, tau = above("lr", lr, 0), below("beta1", beta1, 1), within("tau", tau, _LEAST, _MOST)

    def init(model: Tensor) -> State:
        return {"m": torch.zeros_like(model), "v": torch.full_like(model, tau**2)}

    def apply(state: State, step: Tensor, round: Round) -> tuple[Tensor, State]:
        # An infinite v would never come down again.
        square = step.square().clamp(max=torch.finfo(step.dtype).max / 2)
        m = torch.where(round.kept, beta * state["m"] + (1 - beta) * step, 0.0)
        v = torch.where(round.kept, second(state["v"], square), tau**2)
        v = v.clamp(max=torch.finfo(step.dtype).max / 2)
        m, v = round.where_heard(m, state["m"]), round.where_heard(v, state["v"])
        return rate * m / (v.sqrt() + tau), {"m": m, "v": v}

    return ServerStep(init, apply)
