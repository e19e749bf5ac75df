"""The server's half of a client algorithm, as a link of the chain of server steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from safari.aggregation import Round, ServerStep
from safari.training import ServerHalf


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
