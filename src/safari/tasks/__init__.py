"""What outputs and labels mean: the loss, the metrics, and which of them is the score."""

from __future__ import annotations

from collections.abc import Callable

from safari.tasks.checked import checked_task
from safari.tasks.classification import classification
from safari.tasks.multilabel import multilabel
from safari.tasks.regression import regression
from safari.tasks.task import Measure, Metric, Task, with_metric
from safari.tasks.tokens import tokens
from safari.tasks.units import Units

TASKS: dict[str, Callable[..., Task]] = {
    "classification": classification,
    "tokens": tokens,
    "multilabel": multilabel,
    "regression": regression,
}
"""Tasks by name; the keyword-only parameters of each are its options."""

__all__ = [
    "TASKS",
    "Measure",
    "Metric",
    "Task",
    "Units",
    "checked_task",
    "classification",
    "multilabel",
    "regression",
    "tokens",
    "with_metric",
]
