"""The server's half of a client algorithm, as a link of the chain of server steps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from safari.aggregation import Round, ServerStep
from safari.aggregation.steps.average import AVERAGE
from safari.training import ClientAlgorithm, Known, LocalRound, ServerHalf


def half_step(half: ServerHalf, clients: int, parameters: int) -> ServerStep:
    """The half as a server step, which sees what clients sent beside their models as `round.up`."""

    def init(model: Tensor) -> dict[str, Tensor]:
        first = dict(half.init(clients, parameters, model.device))
        return first if half.average is None else {**first, AVERAGE: model}

    def apply(state: dict[str, Tensor], step: Tensor, round: Round) -> tuple[Tensor, dict[str, Tensor]]:
        if not len(round.arrived):
            return step, state
        kept = {name: tensor for name, tensor in state.items() if name == AVERAGE}
        found, after = half.apply(_without_average(state), step[:parameters], round.up, round)
        return torch.cat([found, step[parameters:]]), dict(after) | kept

    def observe(state: dict[str, Tensor], model: Tensor, round: Round) -> dict[str, Tensor]:
        if half.average is None:
            return state
        found = half.average(_without_average(state), model[:parameters])
        return {**state, AVERAGE: torch.cat([found, model[parameters:]])}

    return ServerStep(init, apply, observe, name="the client algorithm's server half")


def running_average_of(algorithm: ClientAlgorithm, most: float) -> float:
    """`aggregation.average`, or 0 where the algorithm has an average of its own."""
    own = algorithm.server is not None and algorithm.server.average is not None
    return 0.0 if own else most


def half_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The half's own part of the chain's state: it is the first link."""
    own = {name.removeprefix("0."): tensor for name, tensor in state.items() if name.startswith("0.")}
    return _without_average(own)


def _without_average(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name != AVERAGE}


def vectors_up(algorithm: ClientAlgorithm, parameters: int, known: Known | None = None) -> dict[str, int]:
    """The vectors that an algorithm sends up beside a model, by name, and how many numbers each has.

    Found by asking it to finish a round of one step without a gradient. `known`: what its one client knows of its data;
    None, on a server that cannot tell: a sample, of a single class where the algorithm counts labels.
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
        known=known or Known(zeros.new_ones(1, int(algorithm.counts_labels)), zeros.new_ones(1)),
        steps=1,
        lr=0.1,
        gradient=lambda at: zeros,
    )
    state = algorithm.init(1, parameters, device)
    if algorithm.direction is not None:
        _, state = algorithm.direction(zeros, local(state=state, step=0))
    _, up = algorithm.finish(local(state=state, step=1))
    return {name: rows.shape[1] for name, rows in up.items()}
