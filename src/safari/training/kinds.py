"""Client algorithms by name, and what the answers of a user's own must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from safari.contracts import describe, pair, rows, tensor, tensors
from safari.errors import ConfigError, brief
from safari.kinds import Kind
from safari.training.algorithm import ClientAlgorithm, LocalRound, Scaled, State
from safari.training.algorithms import (
    bvr_l_sgd,
    calibrated,
    dane,
    fedavg,
    fedawe,
    feddyn,
    fednova,
    fedpbc,
    fedprox,
    masked_loss,
    mime,
    scaffold,
)


def _first(found: Any, clients: int, *given: Any) -> State:
    return rows("the state that init returns", found, clients)


def _begin(found: Any, start: Tensor, *given: Any) -> Tensor:
    return tensor("begin", found, start.shape)


def _loss(found: Any, outputs: Tensor, *given: Any) -> Tensor:
    return tensor("loss", found, outputs.shape[:2])


def _direction(found: Any, gradient: Tensor, local: LocalRound) -> tuple[Tensor, State]:
    direction, state = pair("direction", "(direction, state)", found)
    state = tensors("the state that direction returns", state)
    return tensor("direction", direction, gradient.shape), state


def _scaled(found: Any, down: State) -> Scaled:
    if not isinstance(found, Scaled):
        raise ConfigError(f"scaled must return a Scaled, got {describe(found)}")
    return found


def _finish(found: Any, local: LocalRound) -> tuple[State, State]:
    state, up = pair("finish", "(state, up)", found)
    vectors = rows("what finish sends up", up, len(local.model), ndim=2)
    # That it has all tensors of `init` is checked where they are stored; others are dropped there.
    return tensors("the state that finish returns", state), vectors


def _sends(found: Any, parameters: int) -> Mapping[str, int]:
    if not isinstance(found, Mapping) or not all(isinstance(size, int) for size in found.values()):
        raise ConfigError(f"sends must return the sizes of vectors by name, got {brief(found)}")
    return found


def _send(found: Any, local: LocalRound) -> Tensor:
    return tensor("send", found, local.model.shape)


def _tensors(what: str, found: Any, *given: Any) -> State:
    return tensors(what, found)


def _server_apply(found: Any, state: State, step: Tensor, *given: Any) -> tuple[Tensor, State]:
    after, following = pair("the server's apply", "(step, state)", found)
    following = tensors("the state that the server's apply returns", following)
    return tensor("the server's apply", after, step.shape), following


def _server_average(found: Any, state: State, model: Tensor) -> Tensor:
    return tensor("the server's average", found, model.shape)


_CONTRACT: Mapping[str, Callable[..., Any]] = {
    "init": _first,
    "begin": _begin,
    "loss": _loss,
    "direction": _direction,
    "scaled": _scaled,
    "direction.scaled": _scaled,
    "finish": _finish,
    "sends": _sends,
    "send": _send,
    "server.init": partial(_tensors, "the state that the server's init returns"),
    "server.down": partial(_tensors, "what the server's down returns"),
    "server.apply": _server_apply,
    "server.average": _server_average,
}

CLIENTS: Kind[Callable[..., ClientAlgorithm]] = Kind(
    "client",
    ClientAlgorithm,
    {
        "fedavg": fedavg,
        "calibrated": calibrated,
        "masked-loss": masked_loss,
        "fedprox": fedprox,
        "scaffold": scaffold,
        "mime": mime,
        "feddyn": feddyn,
        "fednova": fednova,
        "dane": dane,
        "bvr-l-sgd": bvr_l_sgd,
        "fedpbc": fedpbc,
        "fedawe": fedawe,
    },
    tables=("client",),
    contract=_CONTRACT,
)
