"""Every server step by the name that a config gives it; a step's keyword arguments are its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from safari.aggregation.steps.average import average
from safari.aggregation.steps.fedavgm import fedavgm
from safari.aggregation.steps.fedopt import fedadagrad, fedadam, fedyogi
from safari.aggregation.steps.ghbm import ghbm
from safari.aggregation.steps.lr import lr
from safari.aggregation.steps.step import ServerStep
from safari.errors import ConfigError
from safari.kinds import Kind

STEPS: Kind[Callable[..., ServerStep]] = Kind(
    "step",
    ServerStep,
    {
        "lr": lr,
        "fedavgm": fedavgm,
        "fedadagrad": fedadagrad,
        "fedyogi": fedyogi,
        "fedadam": fedadam,
        "ghbm": ghbm,
    },
    tables=("aggregation.steps",),
    key="",
)


def steps_of(named: Sequence[tuple[str, Mapping[str, Any]]], most: float = 0.0) -> list[ServerStep]:
    """The server steps with these names and options, and the running average where `most` asks for one.

    >>> [step.name for step in steps_of([("lr", {"lr": 0.5})], most=0.9)]
    ['aggregation.steps[0]: lr', 'the step']
    """
    links: list[ServerStep] = []
    problems: list[str] = []
    for k, (name, options) in enumerate(named):
        try:
            links.append(STEPS.build(name, options, f"aggregation.steps[{k}]"))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return [*links, average(most=most)] if most else links
