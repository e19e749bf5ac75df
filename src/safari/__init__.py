"""SAFARI: federated learning that keeps training when the network loses most of the updates.

The names below are loaded when they are first used: `import safari` is instant, and `safari.wire` and the
command line's help never import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from safari.version import __version__

if TYPE_CHECKING:
    from safari.aggregation import (
        Compensation,
        Decision,
        Outcome,
        Round,
        Server,
        ServerStep,
        combine,
        stand_in,
    )
    from safari.api import resume, run
    from safari.config import Config, parse
    from safari.data import Data
    from safari.engine import Watcher
    from safari.errors import ConfigError, SafariError
    from safari.links import Link
    from safari.models import Layout
    from safari.pruning import MaskPolicy, Masks, Pruner, prune
    from safari.report import Run, load
    from safari.rounds.beside import wire_layout
    from safari.sweep import Comparison, compare, load_sweep
    from safari.tasks import Task
    from safari.training import ClientAlgorithm, ServerHalf

__all__ = [
    "ClientAlgorithm",
    "Comparison",
    "Compensation",
    "Config",
    "ConfigError",
    "Data",
    "Decision",
    "Layout",
    "Link",
    "MaskPolicy",
    "Masks",
    "Outcome",
    "Pruner",
    "Round",
    "Run",
    "SafariError",
    "Server",
    "ServerHalf",
    "ServerStep",
    "Task",
    "Watcher",
    "__version__",
    "combine",
    "compare",
    "load",
    "load_sweep",
    "parse",
    "prune",
    "resume",
    "run",
    "stand_in",
    "wire_layout",
]

_HOMES = {
    "aggregation": (
        "Compensation",
        "Decision",
        "Outcome",
        "Round",
        "Server",
        "ServerStep",
        "combine",
        "stand_in",
    ),
    "api": ("resume", "run"),
    "config": ("Config", "parse"),
    "data": ("Data",),
    "engine": ("Watcher",),
    "errors": ("ConfigError", "SafariError"),
    "links": ("Link",),
    "models": ("Layout",),
    "pruning": ("MaskPolicy", "Masks", "Pruner", "prune"),
    "report": ("Run", "load"),
    "rounds.beside": ("wire_layout",),
    "sweep": ("Comparison", "compare", "load_sweep"),
    "tasks": ("Task",),
    "training": ("ClientAlgorithm", "ServerHalf"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"safari.{home}"), name)
    if name in {*_HOMES, "flower", "plugins", "report", "runs", "sweep", "trust", "view", "wire"}:
        return importlib.import_module(f"safari.{name}")
    raise AttributeError(f"module 'safari' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
