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

_RULE, _STEP, _GATE = "rule.", "step.", "gate."


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
    return tensors | {f"{_GATE}{name}": tensor for name, tensor in server.gate_state.items()}


def with_tensors(server: Server, round: int, tensors: Mapping[str, Tensor]) -> Server:
    """The server after `round` rounds, from what `to_tensors` gave; other names are ignored.

    SafariError where the state of a step is not there, or of another form. A gate starts anew where its
    state is not there: older checkpoints have none.
    """
    device = server.model.device
    state = {
        name.removeprefix(_RULE): tensor.to(device)
        for name, tensor in tensors.items()
        if name.startswith(_RULE)
    }
    steps: State = {}
    for name, first in server.step_state.items():
        found = tensors.get(_step_name(name))
        if found is None or found.shape != first.shape or found.dtype != first.dtype:
            got = "nothing" if found is None else f"shape {[*found.shape]} and {found.dtype}"
            raise SafariError(
                f"{_step_name(name)} must be a tensor of shape {[*first.shape]} and {first.dtype}, got {got}"
            )
        steps[name] = found.to(device)
    # What a gate has learned of vectors beside the models is not in its first state.
    gate = {n.removeprefix(_GATE): t.to(device) for n, t in tensors.items() if n.startswith(_GATE)}
    gate |= {name: _inside(first, tensors.get(f"{_GATE}{name}")) for name, first in server.gate_state.items()}
    return replace(
        server,
        model=tensors["model"].to(device),
        round=round,
        state=state,
        step_state=steps,
        gate_state=gate,
    )


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
    # Its name before there were steps; users read it from checkpoints, too.
    return "average" if name.rpartition(".")[2] == AVERAGE else f"{_STEP}{name}"
