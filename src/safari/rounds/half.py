"""The server's half of a client algorithm, as a link of the chain of server steps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from safari.aggregation import Round, ServerStep
from safari.training import ClientAlgorithm, Known, LocalRound, ServerHalf


def half_step(half: ServerHalf, clients: int, parameters: int) -> ServerStep:
    """The half as a server step, which sees what clients sent beside their models as `round.up`."""

    def init(model: Tensor) -> dict[str, Tensor]:
        return dict(half.init(clients, parameters, model.device))

    def apply(state: dict[str, Tensor], step: Tensor, round: Round) -> tuple[Tensor, dict[str, Tensor]]:
        if not len(round.arrived):
            return step, state
        found, after = half.apply(state, step[:parameters], round.up, round)
        return torch.cat([found, step[parameters:]]), dict(after)

    return ServerStep(init, apply, name="the client algorithm's server half")


def half_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The half's own part of the chain's state: it is the first link."""
    return {name.removeprefix("0."): tensor for name, tensor in state.items() if name.startswith("0.")}


def vectors_up(algorithm: ClientAlgorithm, parameters: int) -> dict[str, int]:
    """The vectors that an algorithm sends up beside a model, by name, and how many numbers each has.

    Found by asking it to finish a round of one step without a gradient.
    """
    if algorithm.finish is None:
        return {}
    zeros, device = torch.zeros(1, parameters), torch.device("cpu")
    server = algorithm.server
    down = {} if server is None else server.down(server.init(1, parameters, device))
    local = partial(
        LocalRound,
        model=zeros,
        start=zeros,
        mask=torch.ones_like(zeros, dtype=torch.bool),
        down=down,
        known=Known(zeros.new_zeros(1, 0), zeros.new_ones(1)),
        steps=1,
        lr=0.1,
        gradient=lambda at: zeros,
    )
    state = algorithm.init(1, parameters, device)
    if algorithm.direction is not None:
        _, state = algorithm.direction(zeros, local(state=state, step=0))
    _, up = algorithm.finish(local(state=state, step=1))
    return {name: rows.shape[1] for name, rows in up.items()}
