"""A Flower run as one of our configs, so that records, checks and reports are the same as everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from safari.aggregation import Compensation
from safari.config import Config, parse
from safari.errors import ConfigError
from safari.flower.terms import known_pruner

# What Flower and the user's own code decide: a name in the record, and no built-in's.
_ELSEWHERE = {"data": "flower", "partition": "flower", "uplink": "flower", "downlink": "flower"}


def settings(
    module: nn.Module,
    clients: int,
    rule: str | Mapping[str, Any] | Compensation,
    config: Config | Mapping[str, Any] | None,
) -> Config:
    """The config that a strategy's arguments come to; ConfigError lists all that is wrong with it.

    >>> found = settings(nn.Linear(2, 2), 5, "drop", {"pruning": {"sparsity": 0.9}})
    >>> found.clients, found.arms[0].name, found.pruning.sparsity, found.data.name, found.model.name
    (5, 'drop', 0.9, 'flower', 'Linear')
    """
    arm: Any = {"name": "own", "rule": "own"} if isinstance(rule, Compensation) else rule
    arm = dict(arm) if isinstance(arm, Mapping) else arm
    if isinstance(config, Config):
        arms = parse({"arms": [arm]}).arms
        found = replace(config, clients=clients, arms=arms)
    else:
        elsewhere = {name: {"name": plug} for name, plug in _ELSEWHERE.items()}
        basis = {"name": "flower", "checkpoint": {"every": 1}, "model": {"name": type(module).__name__}}
        found = parse({**basis, **elsewhere, **(config or {}), "clients": clients, "arms": [arm]})
    if found.cohort > found.clients:
        raise ConfigError(f"cohort must be at most clients ({clients}), got {found.cohort}")
    known_pruner(found.pruning.pruner)
    return found
