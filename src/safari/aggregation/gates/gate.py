"""Gates, which run before every rule: they let arrivals through, refuse them or scale them down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from safari.aggregation.checks import check_state
from safari.aggregation.compensation import OnHost, Round, State, on_device
from safari.contracts import describe, pair
from safari.errors import ConfigError, one_of


@dataclass(frozen=True)
class Ruling:
    """A gate's decision on the arrivals of a round.

    `refused`: why an arrival is not let through, by client id; its client then counts as missing. `clipped`:
    why an arrival was made smaller, by client id. `models`: the models to go on with, a row for each arrival,
    where some were clipped; None: as they arrived. `up`: the same for vectors that came beside the models, by
    name; those that are not named stay as they arrived.
    """

    refused: Mapping[int, str] = field(default_factory=dict)
    clipped: Mapping[int, str] = field(default_factory=dict)
    models: Tensor | None = None
    up: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Gate:
    """`init(clients, size, device) -> state`; `apply(state, round) -> (ruling, state)`.

    The state is a dict of named tensors, as that of rules. A gate that lets everything through as it is
    changes no bit of a round. `name` is what messages about the gate begin with.
    """

    init: Callable[[int, int, torch.device], State]
    apply: Callable[[State, Round], tuple[Ruling, State]]
    name: str = "the gate"


def judge(gate: Gate, state: State, round: Round) -> tuple[Ruling, State]:
    """A gate's ruling, of which every part has the form that the server needs, and its next state."""
    ruling, following = pair(f"{gate.name}: apply", "(Ruling, state)", gate.apply(state, round), Ruling)
    if ruling.models is not None:
        _check_like(gate, "models", ruling.models, round.models)
    for name, rows in ruling.up.items():
        if name not in round.up:
            raise ConfigError(f"{gate.name}: {one_of('up', name, round.up)}")
        _check_like(gate, f"up[{name!r}]", rows, round.up[name])
    return ruling, check_state(gate.name, "apply", following)


def _check_like(gate: Gate, name: str, found: object, given: Tensor) -> None:
    fits = isinstance(found, Tensor) and found.shape == given.shape
    if not (
        fits and isinstance(found, Tensor) and found.dtype == given.dtype and found.device == given.device
    ):
        raise ConfigError(
            f"{gate.name}: {name} must be a tensor of shape {[*given.shape]}, {given.dtype} on {given.device}, "
            f"got {describe(found)}"
        )


def admitted(round: Round, ruling: Ruling) -> Round:
    """The round as the rule sees it: without those that were refused, with what was clipped."""
    if ruling.models is not None:
        round = replace(round, models=ruling.models)
    if ruling.up:
        round = replace(round, up={**round.up, **ruling.up})
    return without(round, ruling.refused) if ruling.refused else round


def without(round: Round, clients: Mapping[int, str]) -> Round:
    """The round in which these clients did not arrive."""
    good = [row for row, client in enumerate(round.arrived_ids) if client not in clients]
    rows = on_device(good, round.models.device)
    arrived = round.arrived[rows]
    # An expanded view is one mask and stays one.
    shared = len(round.masks) > 0 and round.masks.stride(0) == 0
    masks = round.masks[:1].expand(len(good), -1) if shared else round.masks[rows]
    return replace(
        round,
        arrived=arrived,
        on_host=OnHost(
            (round.cohort, arrived, round.weights),
            round.cohort_ids,
            [round.arrived_ids[row] for row in good],
            round.weights_on_host,
        ),
        models=round.models[rows],
        masks=masks,
        came=None if round.came is None else round.came[rows],
        up={name: found[rows] for name, found in round.up.items()},
    )
