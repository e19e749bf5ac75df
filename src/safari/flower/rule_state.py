"""A server that has more clients than before: what its parts hold of the earlier ones, inside the state of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import gt

import torch
from torch import Tensor

from safari.aggregation import Server
from safari.errors import RunError
from safari.training import ServerHalf

# Where a checkpoint holds the state of the algorithm's server side.
_HALF = "algorithm."


def grown_half(
    tensors: Mapping[str, Tensor], half: ServerHalf | None, clients: int, parameters: int
) -> dict[str, Tensor]:
    """A checkpoint's tensors with rows for more clients in the state of a client algorithm's server half."""
    if half is None:
        return dict(tensors)
    device = torch.device("cpu")
    first = {f"{_HALF}{name}": tensor for name, tensor in half.init(clients, parameters, device).items()}
    return {
        name: inside(name, old, first, "client algorithm") if name in first else old
        for name, old in tensors.items()
    }


def grown(server: Server, clients: int) -> Server:
    """The server with `clients` clients, at least as many as before: new ones are as at the first round.

    `server` has been started with the larger number; its `state` is of the smaller one.
    """
    first = server.rule.init(clients, len(server.model), server.model.device)
    return replace(server, state={name: inside(name, old, first) for name, old in server.state.items()})


def inside(name: str, old: Tensor, first: Mapping[str, Tensor], what: str = "rule") -> Tensor:
    """The first state of all clients, with what is known of the earlier ones in its corner."""
    wider = first.get(name)
    if wider is None or wider.ndim != old.ndim or any(map(gt, old.shape, wider.shape)):
        raise RunError(
            f"clients cannot grow with this {what}: its state {name!r} has shape {[*old.shape]}, which does "
            f"not fit into {'nothing' if wider is None else [*wider.shape]}; begin a new run"
        )
    wider = wider.clone()
    wider[tuple(slice(size) for size in old.shape)] = old
    return wider
