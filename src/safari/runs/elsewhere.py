"""Settings of a Flower run that the clients' own app decides, not the config: no record may claim them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from safari.config import Config

# The name of plug-ins that are not ours to choose.
ELSEWHERE = "flower"
# The fields of a config that do something on Flower: of a section these, () for a field that is none.
EFFECTIVE: Mapping[str, tuple[str, ...]] = {
    "name": (),
    "seed": (),
    "cohort": (),
    "sampling": ("name",),
    "pruning": (
        "pruner",
        "sparsity",
        "scope",
        "dense",
        "least",
        "allow_dead_layers",
        "schedule",
        "initial",
        "begin",
        "end",
    ),
    "policy": ("name",),
    "client": ("name",),
    "local": ("optimiser", "lr", "schedule", "final", "milestones", "factor", "horizon"),
    "wire": ("values", "bits", "step", "ratio", "fraction", "threshold", "feedback"),
    "aggregation": ("weights", "average", "steps", "gate"),
    "evaluation": ("last", "target"),
    "checkpoint": ("every", "keep"),
}
# Sections that the clients' app decides, and that the server gets only where it needs to know them.
_TOLD = ("local",)
# Arguments of the strategy, which a run's config holds, too.
_ARGUMENTS = ("rounds", "clients", "arms", "model", "data", "partition", "uplink", "downlink")


def undecided(config: Config) -> frozenset[str]:
    """The names of fields and sections that say nothing about this run, such as `local` and `wire.every`.

    >>> sorted(undecided(Config()))
    []
    """
    if config.data.name != ELSEWHERE:
        return frozenset()
    found: list[str] = []
    for f in fields(Config):
        section = getattr(config, f.name)
        if f.name in _ARGUMENTS:
            continue
        told = f.name not in _TOLD or section != getattr(Config(), f.name)
        if f.name not in EFFECTIVE or not told:
            found.append(f.name)
        elif is_dataclass(section):
            found += [f"{f.name}.{g.name}" for g in fields(section) if g.name not in EFFECTIVE[f.name]]
    return frozenset(found)


def decided(config: Config) -> dict[str, Any]:
    """The config as tables, without what it does not decide."""
    hidden = undecided(config)
    return {
        name: {k: v for k, v in value.items() if f"{name}.{k}" not in hidden}
        if isinstance(value, Mapping)
        else value
        for name, value in config.to_dict().items()
        if name not in hidden
    }
