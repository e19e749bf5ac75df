"""Checks of what rules, server steps and callers hand to the server. They look at types and shapes alone, so
that none of them waits for a device."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from safari.aggregation.compensation import Compensation, Decision, Round, State, Weights
from safari.contracts import describe, pair, tensors
from safari.errors import ConfigError, SafariError


def first_state(rule: Compensation, clients: int, size: int, device: torch.device) -> State:
    """A rule's state before the first round; ConfigError when no checkpoint could hold it."""
    return check_state(rule.name, "init", rule.init(clients, size, device))


def decide(rule: Compensation, state: State, round: Round) -> tuple[Decision, State]:
    """A rule's decision, of which every part has the shape that `combine` needs, and its next state."""
    form = "(Decision, state)"
    decision, following = pair(f"{rule.name}: apply", form, rule.apply(state, round), Decision)
    _decision(rule.name, decision, round)
    decision = replace(decision, stand_ins=_plain_ids(rule.name, decision.stand_ins))
    return decision, check_state(rule.name, "apply", following)


def check_weights(name: str, found: Any, round: Round, sets: Tensor) -> None:
    """ConfigError unless a rule's `weigh` returned what `combine_blocks` needs."""
    if not isinstance(found, Weights):
        raise ConfigError(f"{name}: weigh must return Weights or None, got {describe(found)}")
    count, cohort = sets.shape[1], len(round.cohort)
    _table(name, "a", found.a, (len(sets), count))
    if found.stand_ins is not None:
        clients = cohort if found.clients is None else len(found.clients)
        _table(name, "stand_ins", found.stand_ins, (len(sets), clients, count))
    if found.b is not None or found.recalled is not None:
        recalled = _recalled(name, found.b, found.recalled, round)
        _table(name, "b", found.b, (len(sets), len(recalled)))


def _table(name: str, field: str, found: Any, shape: tuple[int, ...]) -> None:
    fits = isinstance(found, Tensor) and found.shape == shape and found.device.type == "cpu"
    if not fits or found.is_complex():
        got = describe(found) + (f" on {found.device}" if isinstance(found, Tensor) else "")
        raise ConfigError(f"{name}: {field} must be a tensor of shape {[*shape]} on cpu, got {got}")


def check_state(name: str, function: str, state: Any) -> State:
    """The state that a function of a part returned, as a dict of tensors that a checkpoint can hold."""
    return tensors(f"{name}: the state that {function} returns", state)


def whole(field: str, value: Any) -> int:
    """A whole number of any library's kind as Python's own.

    >>> import numpy
    >>> whole("clients", numpy.int64(3))
    3
    """
    try:
        return operator.index(value)
    except TypeError as error:
        raise SafariError(f"{field} must be a whole number, got {value!r}") from error


def whole_ids(field: str, values: Any) -> list[int]:
    """Client ids as Python's whole numbers, so that records of them can be written."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise SafariError(f"{field} must hold client ids, whole numbers; got {describe(values)}")
    return [whole(f"a client id in {field}", value) for value in values]


def _decision(name: str, decision: Decision, round: Round) -> None:
    _weights(name, "a", decision.a, len(round.arrived), "arrivals", round)
    if not isinstance(decision.stand_ins, Mapping):
        raise ConfigError(
            f"{name}: stand_ins must map missing clients to arrivals, got {describe(decision.stand_ins)}"
        )
    if decision.b is None and decision.recalled is None:
        return
    recalled = _recalled(name, decision.b, decision.recalled, round)
    _weights(name, "b", decision.b, len(recalled), "rows of recalled", round)


def _plain_ids(name: str, stand_ins: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Stand-ins by client, with ids as Python's whole numbers, which records can hold."""
    try:
        return {whole("a client", j): tuple(whole_ids("a list", who)) for j, who in stand_ins.items()}
    except SafariError as error:
        raise ConfigError(f"{name}: stand_ins must map client ids to lists of them: {error}") from error


def _recalled(name: str, b: Any, recalled: Any, round: Round) -> Tensor:
    size = len(round.global_model)
    if b is None or not isinstance(recalled, Tensor):
        raise ConfigError(
            f"{name}: b and recalled belong together, a weight and a model each; "
            f"got {describe(b)} and {describe(recalled)}"
        )
    fits = recalled.ndim == 2 and recalled.shape[1] == size
    if not fits or recalled.dtype != round.models.dtype or recalled.device != round.models.device:
        raise ConfigError(
            f"{name}: recalled must be a matrix with a model of {size} numbers in each row, "
            f"{round.models.dtype} on {round.models.device}; "
            f"got shape {[*recalled.shape]}, {recalled.dtype} on {recalled.device}"
        )
    return recalled


def _weights(name: str, field: str, found: Any, count: int, of: str, round: Round) -> None:
    fits = isinstance(found, Tensor) and found.shape == (count,) and not found.is_complex()
    if not fits or found.device != round.models.device:
        got = describe(found)
        if isinstance(found, Tensor):
            got += f", {found.dtype} on {found.device}"
        raise ConfigError(
            f"{name}: {field} must be a tensor on {round.models.device} with a weight for each of the "
            f"{count} {of}, got {got}"
        )
