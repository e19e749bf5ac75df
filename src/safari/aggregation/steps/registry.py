"""Every server step by the name that a config gives it; a step's keyword arguments are its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from safari.aggregation.steps.average import average
from safari.aggregation.steps.fedavgm import fedavgm
from safari.aggregation.steps.fedopt import fedadagrad, fedadam, fedyogi
from safari.aggregation.steps.ghbm import ghbm
from safari.aggregation.steps.lr import lr
from safari.aggregation.steps.step import ServerStep
from safari.errors import ConfigError
from safari.hosting import build, hosted
from safari.plugins import defaults_of, known

STEPS: dict[str, Callable[..., ServerStep]] = {
    "lr": lr,
    "fedavgm": fedavgm,
    "fedadagrad": fedadagrad,
    "fedyogi": fedyogi,
    "fedadam": fedadam,
    "ghbm": ghbm,
}


def steps_of(named: Sequence[tuple[str, Mapping[str, Any]]], most: float = 0.0) -> list[ServerStep]:
    """The server steps with these names and options, and the running average where `most` asks for one.

    >>> [step.name for step in steps_of([("lr", {"lr": 0.5})], most=0.9)]
    ['aggregation.steps[0]: lr', 'the step']
    """
    links: list[ServerStep] = []
    problems: list[str] = []
    for k, (name, options) in enumerate(named):
        try:
            links.append(_step_of(f"aggregation.steps[{k}]", name, options))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return [*links, average(most=most)] if most else links


def _step_of(field: str, name: str, options: Mapping[str, Any]) -> ServerStep:
    where, step = f"{field}: {name}", build("step", field, name, options, STEPS, ServerStep)
    return replace(step, name=where) if name in STEPS else _checked(step, where)


def _checked(step: ServerStep, where: str) -> ServerStep:
    """A user's server step by its name; the server looks at what it returns."""
    return ServerStep(
        init=lambda model: hosted(where, lambda: step.init(model)),
        apply=lambda state, change, round: hosted(where, lambda: step.apply(state, change, round)),
        observe=lambda state, model, round: hosted(where, lambda: step.observe(state, model, round)),
        name=where,
    )


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
