"""A server whose clients change: more of them, or others in their seats.

A rule's state is a dict of tensors, of which some have one or two axes that run over the clients (a memory of
updates, a matrix of similarities). To find these axes, the rule is asked for its first state with one client
more: the axes that grow are those. So this works with any rule, also a user's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import gt

import torch
from torch import Tensor

from safari.aggregation import Server
from safari.aggregation.compensation import State
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
    first = _first_state(server, clients)
    return replace(server, state={name: inside(name, old, first) for name, old in server.state.items()})


def vacated(server: Server, seats: Iterable[int], half: ServerHalf | None = None) -> Server:
    """The server without what its rule, its update filter and `half`, the server's side of the client algorithm, have
    learnt of the clients that had these seats.

    >>> import torch
    >>> server = Server.start(torch.zeros(2), clients=2, rule="safari")
    >>> server, _ = server.step({0: torch.ones(2), 1: torch.ones(2)})
    >>> server.state["similarity"], server.gate_state["norms"][:, 0]
    (tensor([[-0., -0.],
            [-0., -0.]]), tensor([1.4142, 1.4142], dtype=torch.float64))
    >>> server = vacated(server, [1])
    >>> server.state["similarity"], server.gate_state["norms"][:, 0]
    (tensor([[-0., nan],
            [nan, nan]]), tensor([1.4142,    nan], dtype=torch.float64))
    """
    rows = sorted(set(seats))
    if not rows:
        return server
    clients, size = len(server.weights), len(server.model)
    gate = vacated_rows(server.gate.init, server.gate_state, clients, size, rows)
    # Norms of vectors that come beside the models, which a first state does not know.
    for name in gate.keys() - server.gate.init(clients, 1, server.model.device).keys():
        if gate[name].shape == (clients,) and gate[name].is_floating_point():
            gate[name] = gate[name].index_fill(0, torch.tensor(rows), math.nan)
    state = server.algorithm_state
    return replace(
        server,
        state=vacated_rows(server.rule.init, server.state, clients, size, rows),
        gate_state=gate,
        algorithm_state=state
        if half is None
        else vacated_rows(half.init, state, clients, server.parameters, rows),
    )


def vacated_rows(
    init: Callable[[int, int, torch.device], Mapping[str, Tensor]],
    state: State,
    clients: int,
    parameters: int,
    seats: Iterable[int],
) -> State:
    """A part's state without what it holds of the clients that had these seats; `init` is the part's own."""
    rows = sorted(set(seats))
    if not rows or not state:
        return state
    device = torch.device("cpu")
    first = init(clients, parameters, device)
    # One number is enough to see the axes; a whole model would be allocated for nothing.
    axes = _changed_axes(init(clients, 1, device), init(clients + 1, 1, device))
    return {
        name: _cleared(old, first[name], axes[name], rows)
        if name in axes and first[name].shape == old.shape
        else old
        for name, old in state.items()
    }


def _cleared(old: Tensor, first: Tensor, axes: Sequence[int], rows: Sequence[int]) -> Tensor:
    """A tensor that is as at first for these clients, along these axes."""
    new, index = old.clone(), torch.tensor(rows, device=old.device)
    for axis in axes:
        new = new.index_copy(axis, index, first.index_select(axis, index))
    return new


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


def _first_state(server: Server, clients: int) -> State:
    return server.rule.init(clients, len(server.model), server.model.device)


def _changed_axes(here: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {
        name: [i for i, (a, b) in enumerate(zip(here[name].shape, more[name].shape, strict=True)) if a != b]
        for name in here
        if name in more and here[name].ndim == more[name].ndim
    }
