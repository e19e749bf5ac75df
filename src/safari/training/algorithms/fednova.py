"""FedNova (Wang et al., NeurIPS 2020): clients that make more steps do not count for more.

    d_i = (w_i - x) / τ_i,   x_next = x + τ_eff Σ_i p_i d_i,   τ_eff = Σ_i p_i τ_i

A client sends x + d_i in place of its model, and its number of steps beside it. Every rule for the missing
then works on updates of one length, and the server multiplies the step by τ_eff of those it has heard of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from safari.aggregation import Round
from safari.training.algorithm import ClientAlgorithm, LocalRound, ServerHalf, State


def fednova() -> ClientAlgorithm:
    """FedNova: updates are divided by the number of local steps, the mean is multiplied by the mean number.

    Matters where clients differ in steps (`local.epochs` with parts of different sizes). When an upload is
    lost, the number of steps is what the server last heard of that client; 0 for one that it has never heard,
    which is left out.
    """

    def finish(local: LocalRound) -> tuple[State, State]:
        steps = local.model.new_ones(len(local.model), 1) * local.steps
        return local.state, {"steps": steps}

    def start(clients: int, parameters: int, device: torch.device) -> State:
        return {"steps": torch.zeros(clients, device=device)}

    def apply(state: State, step: Tensor, up: State, round: Round) -> tuple[Tensor, State]:
        heard = state["steps"].index_copy(0, round.arrived, up["steps"][:, 0])
        asked = heard[round.cohort]
        weights = round.weights.to(asked) * (asked > 0)
        # No client makes 0 steps or fewer; one that says so must not turn the model into NaN.
        mean = torch.where(weights.sum() > 0, weights @ asked / weights.sum(), 1.0)
        return step * mean, {"steps": heard}

    server = ServerHalf(start, lambda state: {}, apply)
    return ClientAlgorithm(
        finish=finish, sends=lambda parameters: {"steps": 1}, send=_normalised, server=server
    )


def _normalised(local: LocalRound) -> Tensor:
    return local.start + (local.model - local.start) / local.steps
