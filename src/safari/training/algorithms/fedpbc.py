"""FedPBC (Xiang et al., 2023): FedAvg with a postponed broadcast: only clients whose upload arrived get the mean.

a client begins at   x, if its last upload arrived; else at w_i, where its own last local steps ended
the server           x_next = mean of w_i over the arrivals
"""

from __future__ import annotations

import torch
from torch import Tensor

from safari.aggregation import Round
from safari.training.algorithm import ClientAlgorithm, LocalRound, ServerHalf, State
from safari.training.algorithms.memory import vector_each


def fedpbc() -> ClientAlgorithm:
    """FedPBC: a client whose upload was lost goes on from its own model, not from the broadcast.

    With the rule `drop`. A client learns that its upload arrived from the next broadcast that it hears: the server
    sends each client how many of its uploads have arrived. A client that hears nothing does not train.
    """

    def init(clients: int, parameters: int, device: torch.device) -> State:
        # The server never counts -1, so a client's first round begins at the broadcast.
        return {
            "own": vector_each(clients, parameters, device),
            "count": torch.full((clients, 1), -1.0, device=device),
        }

    def begin(start: Tensor, state: State, down: State) -> Tensor:
        return torch.where(down["count"] == state["count"], state["own"], start)

    def finish(local: LocalRound) -> tuple[State, State]:
        return {"own": local.model.clone(), "count": local.down["count"].clone()}, {}

    def server_init(clients: int, parameters: int, device: torch.device) -> State:
        return {"count": torch.zeros(clients, 1, device=device)}

    def apply(state: State, step: Tensor, up: State, round: Round) -> tuple[Tensor, State]:
        arrived = torch.zeros_like(state["count"]).scatter(0, round.arrived[:, None], 1.0)
        return step, {"count": state["count"] + arrived}

    server = ServerHalf(server_init, lambda state: {"count": state["count"]}, apply)
    return ClientAlgorithm(init=init, begin=begin, finish=finish, server=server)
