"""A Flower run as one of our configs, so that records, checks and reports are the same as everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import nn

from safari.aggregation import Compensation
from safari.config import Config, parse
from safari.errors import ConfigError, one_of
from safari.flower.protocol import UPLOADS, known_pruner
from safari.runs.elsewhere import EFFECTIVE, ELSEWHERE
from safari.wire import ValueMode

# What Flower and the user's own code decide: a name in the record, and no built-in's.
_ELSEWHERE = dict.fromkeys(("data", "partition", "uplink", "downlink"), ELSEWHERE)
# Why the levels of qsgd do not follow it.
_NO_LOSS = "a loss that a client states is for the record, and decides nothing"
# Where to say what the others are about.
_INSTEAD = {
    "rounds": "num_rounds of start",
    "clients": "the argument clients",
    "arms": "the argument rule",
    "model": "the argument module",
    "uplink": "the client's mod lossy",
    "downlink": "the client's mod lossy",
    "wire.adapt": f"for the simulator: {_NO_LOSS}",
}

# FedAvg's arguments, and what takes their place.
FEDAVG = {
    "fraction_train": 'config={"cohort": N} draws N clients a round; all are asked by default',
    "fraction_evaluate": "evaluate=True asks those who have just replied",
    "min_train_nodes": "quorum: how many connected nodes a round waits for",
    "min_evaluate_nodes": "evaluate=True asks those who have just replied",
    "min_available_nodes": "min_nodes for the first round, quorum for later ones",
    "weighted_by_key": 'config={"aggregation": {"weights": "samples"}} weighs by num-examples',
    "arrayrecord_key": 'leave it out: the record is called "arrays"',
    "configrecord_key": 'leave it out: the record is called "config"',
    "train_metrics_aggr_fn": "leave it out: metrics are means weighted by num-examples",
    "evaluate_metrics_aggr_fn": "leave it out: metrics are means weighted by num-examples",
}

# The modes of the wire format that lose nothing, and the default, which chooses among them.
EXACT = tuple(mode.value for mode in ValueMode if mode.exact)
# Exact, for clients without our side, or lossy: the modes of the wire format that are.
DOWNLOADS = ("frame", "dense", *(mode.value for mode in ValueMode if not mode.exact))


def check_arguments(
    clients: int,
    identify: str,
    patience: int | None,
    download: str,
    upload: str,
    min_nodes: int,
    wait: float,
    quorum: int,
    give_up: int | None,
    others: Mapping[str, Any] | None = None,
) -> None:
    """ConfigError lists those of a strategy's plain arguments that cannot be; `others`: those that it does not have."""
    problems = [
        f"{name} is an argument of FedAvg; here: {FEDAVG[name]}"
        if name in FEDAVG
        else f"there is no argument {name}"
        for name in others or {}
    ]
    for name, value, allowed in (
        ("identify", identify, ("name", "node")),
        ("download", download, DOWNLOADS),
        ("upload", upload, UPLOADS),
    ):
        if value not in allowed:
            problems.append(one_of(name, value, allowed))
    for name, number, least in (("clients", clients, 1), ("patience", patience, 0), ("give_up", give_up, 1)):
        if number is not None and number < least:
            problems.append(f"{name} must be at least {least}, got {number}")
    for name, nodes in (("min_nodes", min_nodes), ("quorum", quorum)):
        if not 1 <= nodes <= max(1, clients):
            problems.append(f"{name} must lie between 1 and clients ({clients}), got {nodes}")
    if not wait >= 0:
        problems.append(f"wait must be at least 0, got {wait}")
    if problems:
        raise ConfigError(problems)


def settings(
    module: nn.Module,
    clients: int,
    rule: str | Mapping[str, Any] | Compensation,
    config: Config | Mapping[str, Any] | None,
    download: str = "frame",
    upload: str = "frame",
) -> Config:
    """The config that a strategy's arguments amount to; ConfigError lists all that is wrong with it.

    With dense downloads nothing is cut unless `config` says so: clients without our side do not.

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
        _refuse_idle(config or {})
        elsewhere = {name: {"name": plug} for name, plug in _ELSEWHERE.items()}
        basis: dict[str, Any] = {
            "name": "flower",
            "model": {"name": type(module).__name__},
        }
        if download == "dense":
            basis["pruning"] = {"sparsity": 0.0}
        found = parse({**basis, **elsewhere, **(config or {}), "clients": clients, "arms": [arm]})
    if found.cohort > found.clients:
        raise ConfigError(f"cohort must be at most clients ({clients}), got {found.cohort}")
    if found.wire.adapt != "none":
        raise ConfigError(f"wire.adapt must be 'none' on Flower, got {found.wire.adapt!r}: {_NO_LOSS}")
    if upload == "dense" and found.wire.values not in EXACT:
        raise ConfigError(
            f"wire.values must be one of {', '.join(EXACT)} with upload='dense', got {found.wire.values!r}: "
            "plain arrays are exact"
        )
    known_pruner(found.pruning.pruner)
    return found


def _refuse_idle(table: Mapping[str, Any]) -> None:
    """ConfigError for fields of a config that would have no effect; unknown fields are reported elsewhere."""
    idle = []
    for f in fields(Config):
        if f.name not in table:
            continue
        inner = table[f.name] if isinstance(table[f.name], Mapping) else {}
        section = getattr(Config(), f.name)
        if f.name not in EFFECTIVE:
            idle.append(f.name)
        elif is_dataclass(section):
            names = {g.name for g in fields(section)} - set(EFFECTIVE[f.name])
            idle += [f"{f.name}.{name}" for name in inner if name in names]
    if idle:
        known = [
            f"{head}.{name}" if name else head for head, names in EFFECTIVE.items() for name in names or [""]
        ]
        lines = [
            f"config.{name} has no effect here{f': it is {_INSTEAD[name]}' if name in _INSTEAD else ''}"
            for name in idle
        ]
        raise ConfigError([*lines, f"what matters in config: {', '.join(known)}"])
