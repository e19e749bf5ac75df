"""SAFARI: federated learning that keeps training when the network loses most of the updates.

The names below are loaded when they are first used: `import safari` is instant, and `safari.wire` and the
command line's help never import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from safari.version import __version__

if TYPE_CHECKING:
    from safari.aggregation import Compensation, Decision, Outcome, Round, Server, ServerStep, stand_in
    from safari.api import resume, run
    from safari.config import Config, parse
    from safari.data import Data
    from safari.errors import SafariError
    from safari.links import Link
    from safari.models import Layout
    from safari.pruning import Pruner, prune

__all__ = [
    "Compensation",
    "Config",
    "Data",
    "Decision",
    "Layout",
    "Link",
    "Outcome",
    "Pruner",
    "Round",
    "SafariError",
    "Server",
    "ServerStep",
    "__version__",
    "parse",
    "prune",
    "resume",
    "run",
    "stand_in",
]

_HOMES = {
    "aggregation": ("Compensation", "Decision", "Outcome", "Round", "Server", "ServerStep", "stand_in"),
    "api": ("resume", "run"),
    "config": ("Config", "parse"),
    "data": ("Data",),
    "errors": ("SafariError",),
    "links": ("Link",),
    "models": ("Layout",),
    "pruning": ("Pruner", "prune"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"safari.{home}"), name)
    if name in {*_HOMES, "engine", "flower", "report", "runs", "training", "trust", "view", "wire"}:
        return importlib.import_module(f"safari.{name}")
    raise AttributeError(f"module 'safari' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
