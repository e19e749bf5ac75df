"""A server as named tensors and back: the part of a checkpoint that every engine shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from safari.aggregation.server import Server

_RULE = "rule."


def to_tensors(server: Server) -> dict[str, Tensor]:
    """The model and the rule's state, by name; the round is a number and goes beside them.

    >>> import torch
    >>> server = Server.start(torch.zeros(2), clients=3, rule="safari")
    >>> {name: tuple(tensor.shape) for name, tensor in to_tensors(server).items()}
    {'model': (2,), 'rule.similarity': (3, 3)}
    """
    return {"model": server.model} | {f"{_RULE}{name}": tensor for name, tensor in server.state.items()}


def with_tensors(server: Server, round: int, tensors: Mapping[str, Tensor]) -> Server:
    """The server after `round` rounds, from what `to_tensors` gave; other names are ignored."""
    device = server.model.device
    state = {
        name.removeprefix(_RULE): tensor.to(device)
        for name, tensor in tensors.items()
        if name.startswith(_RULE)
    }
    return replace(server, model=tensors["model"].to(device), round=round, state=state)
