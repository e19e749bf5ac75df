"""Tasks by name, and checks of what a user's own task returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from safari.contracts import describe
from safari.errors import ConfigError
from safari.kinds import Kind
from safari.tasks.classification import classification
from safari.tasks.multilabel import multilabel
from safari.tasks.regression import regression
from safari.tasks.task import Task
from safari.tasks.tokens import tokens


def _losses(found: Any, outputs: Tensor, labels: Tensor) -> Tensor:
    if not isinstance(found, Tensor) or found.shape != (len(labels),):
        raise ConfigError(
            f"loss must return a number a sample, a tensor of shape [{len(labels)}], got {describe(found)}"
        )
    return found


def _sums(found: Any, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    if not isinstance(found, Mapping):
        raise ConfigError(f"measure must return a dict of sums over the batch, got {describe(found)}")
    sums: dict[str, Tensor] = {}
    for name, value in found.items():
        plain = isinstance(value, Real)
        if not plain and not (isinstance(value, Tensor) and value.ndim == 0):
            raise ConfigError(
                f"measure must return one number a name, the sum over the batch, got {describe(value)} as {name!r}"
            )
        sums[name] = torch.tensor(float(value), device=outputs.device) if plain else value
    return sums


def _metrics(found: Any, means: Mapping[str, float]) -> Mapping[str, float]:
    if not isinstance(found, Mapping):
        raise ConfigError(f"finish must return a dict of metrics, got {describe(found)}")
    return found


TASKS: Kind[Callable[..., Task]] = Kind(
    "task",
    Task,
    {
        "classification": classification,
        "tokens": tokens,
        "multilabel": multilabel,
        "regression": regression,
    },
    tables=("task",),
    contract={"loss": _losses, "measure": _sums, "finish": _metrics},
)
"""Tasks by name; the keyword-only parameters of each are its options."""
