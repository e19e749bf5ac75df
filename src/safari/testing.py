"""Tests of parts of your own: `check_rule(mine())` raises ConfigError where a rule breaks the contract of rules.

A part is put into a small federation of five clients, in which everybody, some, one and nobody arrive. Besides what
every run checks (types and shapes of answers, states that a checkpoint can hold, finite models), these show what is
silent in a run: a function that changes what it is given in place, that draws from a global generator, or that keeps
something outside the state that it returns, and a client algorithm that sends the change of its state, which is wrong
for good when one upload is lost. The package's own tests do the same to every built-in part.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from safari.aggregation import Compensation, Gate, ServerStep
from safari.config import Config, parse
from safari.data import Data, as_data, from_tensors
from safari.engine import KINDS, assemble, engine_of
from safari.engine.parts import Parts, parts_of
from safari.engine.rehearsal import rehearse_task
from safari.engine.state import initial
from safari.errors import ConfigError, brief
from safari.hosting import sheltered
from safari.kinds import Kind, guarded, wrapped
from safari.links import Link, PacketLink, link_contract
from safari.models import Layout
from safari.pruning import MaskPolicy, Pruner
from safari.sampling import Sampling
from safari.tasks import Task
from safari.training import ClientAlgorithm, LocalRound

# Who arrives in each round.
_ARRIVALS = ("11111", "10100", "00000", "00010", "01110")
_CLIENTS = len(_ARRIVALS[0])
_CONFIG = {
    "rounds": len(_ARRIVALS),
    "clients": _CLIENTS,
    "arms": ["drop"],
    "partition": {"name": "iid"},
    "pruning": {"sparsity": 0.5, "batch": 8, "allow_dead_layers": True},
    "local": {"steps": 2, "batch": 4, "lr": 0.05, "optimiser": "sgd"},
    "wire": {"every": 0},
    "engine": {"name": "reference", "device": "cpu"},
}
# Parts that see models of which a part arrived.
_SEE_PARTS = ("rule", "step", "gate")
# Functions that may write into the state that they are given.
_IN_PLACE = ("remember",)
# Where `Parts` has a part of a kind, when it is not under the kind's name.
_PLACES = {"link": "uplink", "step": "steps", "rule": "rules"}


def check_rule(rule: Compensation) -> None:
    """Check a rule for missing clients."""
    _check("rule", rule)


def check_gate(gate: Gate) -> None:
    """Check a gate."""
    _check("gate", gate)


def check_step(step: ServerStep) -> None:
    """Check a server step."""
    _check("step", step)


def check_client(algorithm: ClientAlgorithm) -> None:
    """Check a client algorithm."""
    _check("client", algorithm)


def check_policy(policy: MaskPolicy) -> None:
    """Check a mask policy."""
    _check("policy", policy)


def check_pruner(pruner: Pruner | Callable[..., Mapping[str, Tensor]]) -> None:
    """Check a pruner, or a score function."""
    _check("pruner", pruner if isinstance(pruner, Pruner) else Pruner(pruner))


def check_sampling(sampling: Sampling) -> None:
    """Check a sampling."""
    _check("sampling", sampling)


def check_link(link: Link) -> None:
    """Check a link."""
    _check("link", link)


def check_packets(link: PacketLink) -> None:
    """Check a link for packets."""
    _check("packets", link)


def check_task(task: Task) -> None:
    """Check a task."""
    _check("task", task)


def check_model(model: Callable[..., nn.Module]) -> None:
    """Check a function that builds a model: it is called with a shape and a number of classes."""
    _play(replace(_parts("class"), model=_sheltered(model)), _data("class"))


def check_data(data: Callable[[], Any]) -> None:
    """Check a function that returns data."""
    made = as_data(_sheltered(_watched("it", data))(), "data")
    _play(_parts(made.label_kind), made)


def check_partition(partition: Callable[..., Any]) -> None:
    """Check a function that divides data: it is called with labels, a number of clients and a generator."""
    _play(replace(_parts("class"), partition=_sheltered(_watched("it", partition))), _data("class"))


def _check(name: str, part: Any) -> None:
    kind = KINDS[name]
    if not isinstance(part, kind.type):
        hint = f", as in check_{name}({part.__name__}())" if inspect.isfunction(part) else ""
        raise ConfigError(f"check_{name} takes a {kind.type.__name__}{hint}, got {brief(part)}")
    labels = part.labels if isinstance(part, Task) else "class"
    tried = _tried(kind, part)
    _play(_with(kind, tried, _parts(labels)), _data(labels))
    if name in _SEE_PARTS:
        packets = {"name": "lossy", "loss": 0.4, "size": 100}
        _play(_with(kind, tried, _parts(labels, packets=packets)), _data(labels))


def _tried(kind: Kind[Any], part: Any) -> Any:
    """The part with functions that are checked and watched."""
    contract = link_contract(_CLIENTS) if kind.name == "link" else kind.contract
    return guarded(wrapped(part, _watched), contract, kind.name)


def _with(kind: Kind[Any], part: Any, parts: Parts) -> Parts:
    holders = {"rule": {"drop": part}, "step": (part,)}
    return replace(parts, **{_PLACES.get(kind.name, kind.name): holders.get(kind.name, part)})


def _config(**tables: Any) -> Config:
    return parse(_CONFIG | tables)


def _parts(labels: str, **tables: Any) -> Parts:
    """The parts of the small federation, with a task for these labels."""
    tasks = {
        "class": "classification",
        "tokens": "tokens",
        "multi-hot": "multilabel",
        "numbers": "regression",
    }
    parts = parts_of(_config(task={"name": tasks[labels]}, **tables))
    return replace(parts, model=_module, uplink=Link(lambda setting: {}, _arrive))


def _play(parts: Parts, data: Data) -> None:
    """All rounds of the small federation with these parts."""
    world = assemble(parts.config, 0, data, parts)
    # Training may use the mean of a task's losses alone.
    rehearse_task(world)
    fed = world.federation()
    state, run = initial(world, fed), engine_of(parts.config)(world)
    for _ in _ARRIVALS:
        state, *_ = run(fed, state)


def _arrive(state: dict[str, np.ndarray], t: int, rng: np.random.Generator) -> tuple[Any, Any]:
    return np.array([answer == "1" for answer in _ARRIVALS[t]]), state


def _module(shape: tuple[int, ...], classes: int, tokens: int = 0, labels: str = "class") -> nn.Module:
    """Two layers, with scores for each number of a sample where labels are tokens."""
    inputs = int(np.prod(shape))
    outputs = inputs * classes if labels == "tokens" else classes
    layers = [nn.Flatten(), nn.Linear(inputs, 24), nn.Tanh(), nn.Linear(24, outputs)]
    return nn.Sequential(*layers, *([nn.Unflatten(1, (inputs, classes))] if labels == "tokens" else []))


def _data(labels: str) -> Data:
    """Sixty samples of four numbers, and as many to test on."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=draw)
    y = {
        "class": (x[:, 0] > 0).long() + (x[:, 1] > 0).long(),
        "tokens": (x > 0).long(),
        "multi-hot": x[:, :3] > 0,
        "numbers": x[:, :2] * 2,
    }[labels]
    return from_tensors("small", (x, y), (x.flip(0), y.flip(0)))


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which raises ConfigError where it is not pure."""

    @functools.wraps(function)
    def watched(*arguments: Any, **options: Any) -> Any:
        before, again, drawn = _copied(arguments), _copied(arguments), _global_draws()
        answer = function(*arguments, **options)
        if not _same(drawn, _global_draws()):
            raise ConfigError(f"{name} draws from a global generator; use the one that it is given")
        if not name.endswith(_IN_PLACE):
            _refuse_changes(name, function, arguments, before)
        if not _same(function(*again, **options), answer):
            raise ConfigError(
                f"{name} answers differently when it is asked twice: what lasts belongs into the state"
            )
        if name == "finish" and isinstance(arguments[0], LocalRound):
            _refuse_differences(arguments[0], *answer)
        return answer

    return watched


def _sheltered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function on its own, which is no field of a part: its errors as one line."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        return sheltered("your function", lambda: function(*arguments, **options))

    return call


def _refuse_changes(name: str, function: Callable[..., Any], now: Any, before: Any) -> None:
    names = list(inspect.signature(function).parameters)
    for k, (argument, copied) in enumerate(zip(now, before, strict=True)):
        if not _same(argument, copied):
            what = names[k] if k < len(names) else f"argument {k}"
            raise ConfigError(f"{name} changes `{what}` in place; return a new one")


def _refuse_differences(local: LocalRound, state: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
    """ConfigError where what goes up is how much a state has changed, and not the state."""
    for name, up in sent.items():
        for key, after in state.items():
            before = local.state.get(key)
            if before is None or before.shape != up.shape or after.shape != up.shape or not before.any():
                continue
            if torch.allclose(up, after - before) and not torch.allclose(up, after):
                raise ConfigError(
                    f"finish sends as {name!r} the change of the state {key!r}: when an upload is lost the "
                    "server's copy is wrong for good; send the state itself"
                )


def _global_draws() -> list[Any]:
    # What torch and numpy draw from when no generator is given, and Python.
    return [torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()]


def _copied(thing: Any) -> Any:
    """A copy of tensors, arrays and generators, wherever they are; everything else as it is."""
    if isinstance(thing, Tensor):
        # A mask for all clients is an expanded view of one row, and stays one.
        one_row = thing.ndim > 1 and len(thing) > 1 and thing.stride(0) == 0
        return thing[:1].detach().clone().expand_as(thing) if one_row else thing.detach().clone()
    if isinstance(thing, np.ndarray | np.random.Generator):
        return copy.deepcopy(thing)
    if isinstance(thing, torch.Generator):
        return torch.Generator(thing.device).set_state(thing.get_state())
    if isinstance(thing, Mapping):
        return {key: _copied(value) for key, value in thing.items()}
    if isinstance(thing, tuple | list):
        return type(thing)(map(_copied, thing))
    if is_dataclass(thing) and not isinstance(thing, type | Layout | Task):
        return replace(thing, **{f.name: _copied(getattr(thing, f.name)) for f in fields(thing) if f.init})
    return thing


def _same(one: Any, other: Any) -> bool:
    """Are all numbers equal, NaN included? Functions and generators are not compared."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        fits = one.shape == other.shape and one.dtype == other.dtype
        return fits and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if is_dataclass(one):
        return type(one) is type(other) and all(
            _same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one) if f.init
        )
    if callable(one) or isinstance(one, np.random.Generator | torch.Generator):
        return True
    return bool(one == other)
