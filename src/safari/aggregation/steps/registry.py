"""Every server step by the name that a config gives it; a step's keyword arguments are its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from safari.aggregation.steps.fedavgm import fedavgm
from safari.aggregation.steps.fedopt import fedadagrad, fedadam, fedyogi
from safari.aggregation.steps.lr import lr
from safari.aggregation.steps.step import ServerStep
from safari.plugins import defaults_of, known

STEPS: dict[str, Callable[..., ServerStep]] = {
    "lr": lr,
    "fedavgm": fedavgm,
    "fedadagrad": fedadagrad,
    "fedyogi": fedyogi,
    "fedadam": fedadam,
}


def step_defaults(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are left as the step has them today: a later version may have others.

    Nothing is imported for this: a user's step that is not loaded has none (`is_known_step`).

    >>> step_defaults("fedavgm", {"momentum": 0.5})
    {'lr': 1.0, 'nesterov': False}
    """
    factory = known("step", name, STEPS)
    return defaults_of(factory, given) if callable(factory) else {}


def is_known_step(name: str) -> bool:
    """Can a step's defaults be told without importing anything?"""
    return callable(known("step", name, STEPS))
