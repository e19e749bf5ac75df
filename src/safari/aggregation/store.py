"""A server as named tensors and back: the part of a checkpoint that every engine shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import gt

from torch import Tensor

from safari.aggregation.compensation import State
from safari.aggregation.server import Server
from safari.aggregation.steps.average import AVERAGE
from safari.errors import SafariError

_RULE, _STEP, _GATE, _ALGORITHM = "rule.", "step.", "gate.", "algorithm."


def to_tensors(server: Server) -> dict[str, Tensor]:
    """The model and the states of rule, steps and gate, by name; the round is a number and goes beside them.

    The running average of the models is `average`, whichever step keeps it.

    >>> import torch
    >>> server = Server.start(torch.zeros(2), clients=3, rule="safari", steps=["fedavgm"])
    >>> {name: tuple(tensor.shape) for name, tensor in to_tensors(server).items()}
    {'model': (2,), 'rule.similarity': (3, 3), 'step.0.velocity': (2,), 'gate.norms': (3, 2)}
    """
    tensors = {"model": server.model} | {f"{_RULE}{name}": tensor for name, tensor in server.state.items()}
    tensors |= {_step_name(name): tensor for name, tensor in server.step_state.items()}
    tensors |= {_algorithm_name(name): tensor for name, tensor in server.algorithm_state.items()}
    return tensors | {f"{_GATE}{name}": tensor for name, tensor in server.gate_state.items()}


def with_tensors(
    server: Server, round: int, tensors: Mapping[str, Tensor], *, any_form: bool = False
) -> Server:
    """The server after `round` rounds, from what `to_tensors` gave; names of other parts are ignored.

    SafariError where model, rule, steps or gate are not those of `server`: where a tensor is not there, or of
    another form. A gate's state may be of fewer clients.

    Args:
        server: a server that was started with the same clients, rule, steps and gate.
        round: how many rounds there have been.
        tensors: what to put into it.
        any_form: take the states of rule and gate as they are. For a rule of your own whose tensors change
            their shape, go or come, and for callers that look at them themselves.
    """
    device = server.model.device
    state = _part(_RULE, tensors)
    # What a gate has learned of vectors beside the models is not in its first state.
    gate = _part(_GATE, tensors)
    if not any_form:
        state = _rule_state(server, state)
        _check_gate(server.gate_state, gate)
    steps = {
        name: _fitting(_step_name(name), tensors.get(_step_name(name)), first)
        for name, first in server.step_state.items()
    }
    algorithm = {
        name: _fitting(_algorithm_name(name), tensors.get(_algorithm_name(name)), first)
        for name, first in server.algorithm_state.items()
    }
    gate = {name: tensor.to(device) for name, tensor in gate.items()} | {
        name: _inside(first, gate.get(name)) for name, first in server.gate_state.items()
    }
    return replace(
        server,
        model=_fitting("model", tensors.get("model"), server.model).to(device),
        round=round,
        state={name: tensor.to(device) for name, tensor in state.items()},
        step_state={name: tensor.to(device) for name, tensor in steps.items()},
        algorithm_state={name: tensor.to(device) for name, tensor in algorithm.items()},
        gate_state=gate,
    )


def _part(prefix: str, tensors: Mapping[str, Tensor]) -> State:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _rule_state(server: Server, found: State) -> State:
    """The state of the server's rule, in the form of its first one."""
    more = sorted(found.keys() - server.state.keys())
    if more:
        expected = ", ".join(_RULE + name for name in server.state) or "none"
        raise SafariError(
            f"{_RULE}{more[0]} is no part of the state of {server.rule.name}: it must have {expected}, "
            f"got shape {[*found[more[0]].shape]}; start the server with the rule that was saved"
        )
    return {name: _fitting(_RULE + name, found.get(name), first) for name, first in server.state.items()}


def _check_gate(first: State, found: State) -> None:
    for name in first.keys() & found.keys():
        like, got = first[name], found[name]
        fits = got.dtype == like.dtype and got.ndim == like.ndim
        if not fits or any(map(gt, got.shape, like.shape)):
            raise SafariError(
                f"{_GATE}{name} must be a tensor of shape {[*like.shape]} or less and {like.dtype}, "
                f"got shape {[*got.shape]} and {got.dtype}"
            )


def _fitting(name: str, found: Tensor | None, like: Tensor) -> Tensor:
    if found is None or found.shape != like.shape or found.dtype != like.dtype:
        got = "nothing" if found is None else f"shape {[*found.shape]} and {found.dtype}"
        raise SafariError(f"{name} must be a tensor of shape {[*like.shape]} and {like.dtype}, got {got}")
    return found


def _inside(first: Tensor, found: Tensor | None) -> Tensor:
    """A gate's first state with what is known, perhaps of fewer clients, in its corner."""
    if found is None or found.ndim != first.ndim or found.dtype != first.dtype:
        return first
    if any(map(gt, found.shape, first.shape)):
        return first
    out = first.clone()
    out[tuple(slice(size) for size in found.shape)] = found.to(first.device)
    return out


def _step_name(name: str) -> str:
    # Users read it from checkpoints, whichever step keeps it.
    return "average" if name.rpartition(".")[2] == AVERAGE else f"{_STEP}{name}"


def _algorithm_name(name: str) -> str:
    return "average" if name == AVERAGE else f"{_ALGORITHM}{name}"
