"""The client algorithm that a config names; mistakes in what a user's own returns are told by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from safari.aggregation import Round
from safari.errors import ConfigError, brief
from safari.hosting import build, hosted
from safari.tasks import Task
from safari.training.algorithm import ClientAlgorithm, Known, LocalRound, Scaled, ServerHalf, State
from safari.training.algorithms import CLIENTS


def client_of(name: str, options: Mapping[str, Any]) -> ClientAlgorithm:
    """The client algorithm that a config names, with its options; a user's own is called under its name.

    >>> client_of("fedprox", {"mu": -1.0})
    Traceback (most recent call last):
    ...
    safari.errors.ConfigError: client: mu must be a finite number of at least 0, got -1.0
    """
    found = build("client", "client", name, options, CLIENTS, ClientAlgorithm)
    return found if name in CLIENTS else _checked(found, f"client.name: {name}")


def _checked(own: ClientAlgorithm, where: str) -> ClientAlgorithm:
    checked = _Own(own, where)
    parts: dict[str, Any] = {
        name: getattr(checked, name)
        for name in ("begin", "loss", "direction", "scaled", "finish", "sends", "send")
        if getattr(own, name) is not None
    }
    if own.scaled is not None:
        # A direction is made of it.
        parts["direction"] = None
    if own.keeps_state:
        parts["init"] = checked.init
    if own.server is not None:
        parts["server"] = _OwnHalf(own.server, where).checked()
    return replace(own, **parts, check=lambda task: hosted(where, lambda: own.check(task)), name=where)


@dataclass(frozen=True)
class _Own:
    """The parts of a user's algorithm, which is `where` in a config. Those that it does not have are not called."""

    own: Any
    where: str

    def init(self, clients: int, parameters: int, device: torch.device) -> State:
        def call() -> State:
            return _rows("the state that init returns", self.own.init(clients, parameters, device), clients)

        return hosted(self.where, call)

    def begin(self, start: Tensor, state: State, down: State) -> Tensor:
        return hosted(self.where, lambda: _tensor("begin", self.own.begin(start, state, down), start.shape))

    def loss(self, outputs: Tensor, labels: Tensor, known: Known, task: Task) -> Tensor:
        def call() -> Tensor:
            return _tensor("loss", self.own.loss(outputs, labels, known, task), outputs.shape[:2])

        return hosted(self.where, call)

    def direction(self, gradient: Tensor, local: LocalRound) -> tuple[Tensor, State]:
        def call() -> tuple[Tensor, State]:
            found, state = _pair("direction", "(direction, state)", self.own.direction(gradient, local))
            state = _tensors("the state that direction returns", state)
            return _tensor("direction", found, gradient.shape), state

        return hosted(self.where, call)

    def scaled(self, down: State) -> Scaled:
        def call() -> Scaled:
            found = self.own.scaled(down)
            if not isinstance(found, Scaled):
                raise ConfigError(f"scaled must return a Scaled, got {_told(found)}")
            return found

        return hosted(self.where, call)

    def finish(self, local: LocalRound) -> tuple[State, State]:
        def call() -> tuple[State, State]:
            state, up = _pair("finish", "(state, up)", self.own.finish(local))
            vectors = _rows("what finish sends up", up, len(local.model), ndim=2)
            # That it has all tensors of `init` is checked where they are stored; others are dropped there.
            return _tensors("the state that finish returns", state), vectors

        return hosted(self.where, call)

    def sends(self, parameters: int) -> Mapping[str, int]:
        def call() -> Mapping[str, int]:
            sizes = self.own.sends(parameters)
            if not isinstance(sizes, Mapping) or not all(isinstance(size, int) for size in sizes.values()):
                raise ConfigError(f"sends must return the sizes of vectors by name, got {brief(sizes)}")
            return sizes

        return hosted(self.where, call)

    def send(self, local: LocalRound) -> Tensor:
        return hosted(self.where, lambda: _tensor("send", self.own.send(local), local.model.shape))


@dataclass(frozen=True)
class _OwnHalf:
    """The same of its server's half."""

    own: Any
    where: str

    def checked(self) -> ServerHalf:
        """It, with every answer looked at."""
        return ServerHalf(self.init, self.down, self.apply, self.average if self.own.average else None)

    def init(self, clients: int, parameters: int, device: torch.device) -> State:
        def call() -> State:
            return _tensors(
                "the state that the server's init returns", self.own.init(clients, parameters, device)
            )

        return hosted(self.where, call)

    def down(self, state: State) -> State:
        return hosted(self.where, lambda: _tensors("what the server's down returns", self.own.down(state)))

    def apply(self, state: State, step: Tensor, up: State, round: Round) -> tuple[Tensor, State]:
        def call() -> tuple[Tensor, State]:
            found, after = _pair(
                "the server's apply", "(step, state)", self.own.apply(state, step, up, round)
            )
            after = _tensors("the state that the server's apply returns", after)
            return _tensor("the server's apply", found, step.shape), after

        return hosted(self.where, call)

    def average(self, state: State, model: Tensor) -> Tensor:
        def call() -> Tensor:
            return _tensor("the server's average", self.own.average(state, model), model.shape)

        return hosted(self.where, call)


def _pair(function: str, form: str, found: Any) -> tuple[Any, Any]:
    if not isinstance(found, tuple) or len(found) != 2:
        raise ConfigError(f"{function} must return {form}, got {_told(found)}")
    return found


def _tensor(function: str, found: Any, shape: Sequence[int]) -> Tensor:
    if not isinstance(found, Tensor) or found.shape != tuple(shape):
        raise ConfigError(f"{function} must return a tensor of shape {[*shape]}, got {_told(found)}")
    return found


def _tensors(what: str, found: Any) -> dict[str, Tensor]:
    if not isinstance(found, Mapping):
        raise ConfigError(f"{what} must be a dict, got {_told(found)}")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ConfigError(f"{what} must hold tensors by name, got {_told(value)} as {name!r}")
    return dict(found)


def _rows(what: str, found: Any, clients: int, ndim: int | None = None) -> dict[str, Tensor]:
    tensors = _tensors(what, found)
    for name, value in tensors.items():
        if value.ndim == 0 or len(value) != clients or value.ndim != (ndim or value.ndim):
            row = "row of numbers" if ndim else "row"
            raise ConfigError(
                f"{what} must have a {row} for each client that it is called for, {clients} here, "
                f"got {_told(value)} as {name!r}"
            )
    return tensors


def _told(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of shape {[*found.shape]}"
    return "None" if found is None else f"{type(found).__name__} {brief(found, 60)}"
