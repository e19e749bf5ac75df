"""Every server step by the name that a config gives it; a step's keyword arguments are its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from safari.aggregation.steps.fedavgm import fedavgm
from safari.aggregation.steps.fedopt import fedadagrad, fedadam, fedyogi
from safari.aggregation.steps.lr import lr
from safari.aggregation.steps.step import ServerStep
from safari.errors import ConfigError
from safari.plugins import defaults_of, resolve

STEPS: dict[str, Callable[..., ServerStep]] = {
    "lr": lr,
    "fedavgm": fedavgm,
    "fedadagrad": fedadagrad,
    "fedyogi": fedyogi,
    "fedadam": fedadam,
}


def step_defaults(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are left as the step has them today: a later version may have others.

    >>> step_defaults("fedavgm", {"momentum": 0.5})
    {'lr': 1.0, 'nesterov': False}
    """
    try:
        factory = resolve("step", "aggregation.steps", name, STEPS)
    except ConfigError:
        return {}
    return defaults_of(factory, given)
