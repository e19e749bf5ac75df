"""Generalised heavy-ball momentum at the server.

Zaccone et al., "Communication-Efficient Heterogeneous Federated Learning with Generalized Heavy-Ball Momentum", TMLR
2025 (arXiv:2311.18578). Momentum over the last τ rounds instead of the last one, so that it averages over clients
that take part in turns rather than leaning to those that came last:

    x_{t+1} = x_t + Δ_t + β/τ (x_t - x_{t-τ})

with x_s = x_0 for s < 0; τ = 1 is the classical heavy ball. In the paper the momentum term enters every local step
of the clients, to which it is broadcast. Here it is added to the server's step, which needs no further bytes and
agrees with the paper to first order in the local step size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from safari.aggregation.checks import whole
from safari.aggregation.compensation import Round, State
from safari.aggregation.steps.step import ServerStep
from safari.bounds import below, within

# That many models are remembered.
_LONGEST = 100


def ghbm(*, tau: int = 10, momentum: float = 0.9) -> ServerStep:
    """GHBM (2025) at the server: x ← x + Δ + β/τ (x - x_{t-τ}), momentum over the last τ rounds.

    `tau`: τ, about the number of rounds in which every client takes part once. `momentum`: β.
    """
    rounds, beta = within("tau", whole("tau", tau), 1, _LONGEST), below("momentum", momentum, 1)

    def apply(state: State, step: Tensor, round: Round) -> tuple[Tensor, State]:
        return step + beta / rounds * (round.global_model - state["past"][0]), state

    def observe(state: State, model: Tensor, round: Round) -> State:
        if not len(round.arrived):
            return state
        past = torch.cat([state["past"][1:], round.global_model[None]])
        # What was cut has no past: if it comes back, it starts anew.
        return {"past": round.where_heard(torch.where(round.kept, past, model), state["past"])}

    return ServerStep(lambda model: {"past": model.repeat(rounds, 1)}, apply, observe)
