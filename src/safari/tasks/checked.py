"""A task of a user's own: mistakes in what its functions return are told by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from safari.errors import ConfigError, brief
from safari.hosting import hosted, sheltered
from safari.tasks.task import Task


def checked_task(own: Task, where: str) -> Task:
    """The task, which is `where` in a config, with every answer looked at."""

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return hosted(where, lambda: _losses(own.loss(outputs, labels), len(labels)))

    def measure(outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        return hosted(where, lambda: _sums(own.measure(outputs, labels), outputs.device))

    def finish(means: Mapping[str, float]) -> Mapping[str, float]:
        return hosted(where, lambda: _metrics(own, means))

    def check(outputs: Tensor, labels: Tensor, classes: int) -> None:
        # What it refuses is told as the model's problem.
        sheltered(where, lambda: own.check(outputs, labels, classes))

    return replace(own, loss=loss, measure=measure, finish=finish, check=check)


def _losses(found: Any, samples: int) -> Tensor:
    if not isinstance(found, Tensor) or found.shape != (samples,):
        raise ConfigError(
            f"loss must return a number a sample, a tensor of shape [{samples}], got {_told(found)}"
        )
    return found


def _sums(found: Any, device: torch.device) -> dict[str, Tensor]:
    if not isinstance(found, Mapping):
        raise ConfigError(f"measure must return a dict of sums over the batch, got {_told(found)}")
    sums: dict[str, Tensor] = {}
    for name, value in found.items():
        plain = isinstance(value, Real)
        if not plain and not (isinstance(value, Tensor) and value.ndim == 0):
            raise ConfigError(
                f"measure must return one number a name, the sum over the batch, got {_told(value)} as {name!r}"
            )
        sums[name] = torch.tensor(float(value), device=device) if plain else value
    return sums


def _metrics(own: Task, means: Mapping[str, float]) -> Mapping[str, float]:
    found: Any = own.finish(means)
    if not isinstance(found, Mapping) or own.score not in found:
        raise ConfigError(f"a test must find the score {own.score}, got {brief(found)}")
    return found


def _told(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of shape {[*found.shape]}"
    return "None" if found is None else f"{type(found).__name__} {brief(found, 60)}"
