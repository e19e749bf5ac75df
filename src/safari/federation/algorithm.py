"""The server's side of a client algorithm, as the server's first step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from safari.aggregation import Round, ServerStep
from safari.aggregation.steps.average import AVERAGE
from safari.training import ClientAlgorithm, ServerHalf


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


def algorithm_step(algorithm: ClientAlgorithm, clients: int, parameters: int) -> ServerStep | None:
    """The server's side of an algorithm as a server step; None where it has none."""
    return None if algorithm.server is None else half_step(algorithm.server, clients, parameters)


def vectors_along(algorithm: ClientAlgorithm, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Vectors of the next broadcast beside the model, from the state of the algorithm's server side."""
    return {} if algorithm.server is None else dict(algorithm.server.down(_without_average(state)))


def _without_average(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name != AVERAGE}
