"""Per-client vectors of algorithms that correct local steps, and the server's memory of them."""

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


def mean_with_stand_ins(up: str, down: str) -> ServerHalf:
    """Memory as in `mean_of_last`, but a missing client counts with the mean of its stand-ins' vectors.

    Where the rule names no stand-in for it, its own last vector counts, as for clients that were not asked.
    Only what each client sent itself is remembered.
    """

    def init(clients: int, parameters: int, device: torch.device) -> State:
        return {
            up: vector_each(clients, parameters, device),
            "mean": torch.zeros(parameters, device=device),
        }

    def apply(state: State, step: Tensor, sent: State, round: Round) -> tuple[Tensor, State]:
        last = state[up].index_copy(0, round.arrived, sent[up])
        counts = _stand_in_counts(len(last), round).to(last)
        return step, {up: last, "mean": counts @ last / len(last)}

    return ServerHalf(init, lambda state: {down: state["mean"]}, apply)


def mean_of_arrived(up: str, down: str) -> ServerHalf:
    """A server without memory: the mean of the vectors `up` that arrived in the last round in which any did goes
    down as `down` (0 before)."""

    def init(clients: int, parameters: int, device: torch.device) -> State:
        return {"mean": torch.zeros(parameters, device=device)}

    def apply(state: State, step: Tensor, sent: State, round: Round) -> tuple[Tensor, State]:
        return step, {"mean": sent[up].mean(0)}

    return ServerHalf(init, lambda state: {down: state["mean"]}, apply)


def _stand_in_counts(clients: int, round: Round) -> Tensor:
    """Weight of each client's vector, in clients: 1, 0 if others stand in for it, more if it stands in."""
    counts, arrived = torch.ones(clients), set(round.arrived.tolist())
    for client in round.missing.tolist():
        others = [other for other in round.stand_ins.get(client, ()) if other in arrived]
        if others:
            counts[client] = 0.0
            counts[others] += 1 / len(others)
    return counts
