"""A server whose clients change: more of them, or others in their seats.

A rule's state is a dict of tensors, of which some have one or two axes that run over the clients (a memory of
updates, a matrix of similarities). To find these axes, the rule is asked for its first state with one client
more: the axes that grow are those. So this works with any rule, also a user's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from operator import gt

import torch
from torch import Tensor

from safari.aggregation import Server
from safari.aggregation.compensation import State
from safari.errors import RunError


def grown(server: Server, clients: int) -> Server:
    """The server with `clients` clients, at least as many as before: new ones are as at the first round.

    `server` has been started with the larger number; its `state` is of the smaller one.
    """
    first = _first_state(server, clients)
    return replace(server, state={name: _inside(name, old, first) for name, old in server.state.items()})


def vacated(server: Server, seats: Iterable[int]) -> Server:
    """The server without what its rule has learnt of the clients that had these seats.

    >>> import torch
    >>> server = Server.start(torch.zeros(2), clients=2, rule="safari")
    >>> server, _ = server.step({0: torch.ones(2), 1: torch.ones(2)})
    >>> server.state["similarity"]
    tensor([[-0., -0.],
            [-0., -0.]])
    >>> vacated(server, [1]).state["similarity"]
    tensor([[-0., nan],
            [nan, nan]])
    """
    rows = sorted(set(seats))
    if not rows:
        return server
    clients = len(server.weights)
    first, axes = _first_state(server, clients), _client_axes(server, clients)
    state: State = {}
    for name, old in server.state.items():
        new = old.clone()
        for axis in axes.get(name, ()) if name in first and first[name].shape == old.shape else ():
            index = torch.tensor(rows, device=old.device)
            new = new.index_copy(axis, index, first[name].index_select(axis, index))
        state[name] = new
    return replace(server, state=state)


def _inside(name: str, old: Tensor, first: State) -> Tensor:
    """The first state of all clients, with what is known of the earlier ones in its corner."""
    wider = first.get(name)
    if wider is None or wider.ndim != old.ndim or any(map(gt, old.shape, wider.shape)):
        raise RunError(
            f"clients cannot grow with this rule: its state {name!r} has shape {[*old.shape]}, which does "
            f"not fit into {'nothing' if wider is None else [*wider.shape]}; begin a new run"
        )
    wider = wider.clone()
    wider[tuple(slice(size) for size in old.shape)] = old
    return wider


def _first_state(server: Server, clients: int) -> State:
    return server.rule.init(clients, len(server.model), server.model.device)


def _client_axes(server: Server, clients: int) -> dict[str, list[int]]:
    """The axes of each tensor of the state that run over the clients."""
    # One number is enough to see them; a whole model would be allocated for nothing.
    here, more = (server.rule.init(n, 1, server.model.device) for n in (clients, clients + 1))
    return {
        name: [i for i, (a, b) in enumerate(zip(here[name].shape, more[name].shape, strict=True)) if a != b]
        for name in here
        if name in more and here[name].ndim == more[name].ndim
    }
