"""A vector for every client: what algorithms that correct local steps keep, and the server's memory of it."""

from __future__ import annotations

import torch
from torch import Tensor

from safari.aggregation import Round
from safari.errors import ConfigError
from safari.training.algorithm import ServerHalf, State

# Four bytes a number: 8 GB.
MOST_NUMBERS = 2_000_000_000


def vector_each(clients: int, parameters: int, device: torch.device) -> Tensor:
    """Zeros, a row a client; ConfigError where they would not fit."""
    if clients * parameters > MOST_NUMBERS:
        raise ConfigError(
            f"clients × parameters must be at most {MOST_NUMBERS} for a client algorithm that keeps a vector "
            f"for every client, got {clients} × {parameters}"
        )
    return torch.zeros(clients, parameters, device=device)


def mean_of_last(up: str, down: str) -> ServerHalf:
    """A server that remembers the vector `up` of each client as it last arrived (0 before); their mean goes down
    as `down`."""

    def init(clients: int, parameters: int, device: torch.device) -> State:
        return {up: vector_each(clients, parameters, device)}

    def apply(state: State, step: Tensor, sent: State, round: Round) -> tuple[Tensor, State]:
        return step, {up: state[up].index_copy(0, round.arrived, sent[up])}

    return ServerHalf(init, lambda state: {down: state[up].mean(0)}, apply)
