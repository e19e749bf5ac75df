"""FedDyn (Acar et al., ICLR 2021): a dynamic regulariser brings the clients' optima to the global one.

a step follows   g - h_i + α (w - x)
after the round  h_i ← h_i - α (w_i - x)
the server       h = (1/m) Σ_i h_i,   x_next = mean of the models - h / α
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from safari.aggregation import Round
from safari.bounds import above
from safari.training.algorithm import ClientAlgorithm, LocalRound, State
from safari.training.algorithms.memory import mean_of_last, vector_each


def feddyn(*, alpha: float = 0.01) -> ClientAlgorithm:
    """FedDyn: clients keep the gradient h_i at which they ended; the server corrects the mean by theirs.

    When an upload is lost the client keeps its new h_i and the server the one it heard last: h_i is sent as
    it is, so both agree when the client is next heard, and h at the server is always the mean of those it
    holds. `alpha`: the strength of the regulariser.
    """
    above("alpha", alpha, 0)

    def init(clients: int, parameters: int, device: torch.device) -> State:
        return {"h": vector_each(clients, parameters, device)}

    def direction(gradient: Tensor, local: LocalRound) -> tuple[Tensor, State]:
        return gradient - local.state["h"] + alpha * (local.model - local.start), local.state

    def finish(local: LocalRound) -> tuple[State, State]:
        h = torch.where(local.mask, local.state["h"] - alpha * (local.model - local.start), 0.0)
        return {"h": h}, {"h": h}

    memory = mean_of_last("h", down="h")

    def apply(state: State, step: Tensor, up: State, round: Round) -> tuple[Tensor, State]:
        step, held = memory.apply(state, step, up, round)
        return step - held["h"].mean(0) / alpha, held

    server = replace(memory, down=lambda state: {}, apply=apply)
    return ClientAlgorithm(
        init=init,
        direction=direction,
        finish=finish,
        sends=lambda parameters: {"h": parameters},
        server=server,
    )
