"""Meaning of outputs and labels: the loss, the metrics, and which of them is the score."""

from __future__ import annotations

from safari.tasks.classification import classification
from safari.tasks.kinds import TASKS
from safari.tasks.multilabel import multilabel
from safari.tasks.regression import regression
from safari.tasks.task import Measure, Metric, Task, with_metric
from safari.tasks.tokens import tokens
from safari.tasks.units import Units

__all__ = [
    "TASKS",
    "Measure",
    "Metric",
    "Task",
    "Units",
    "classification",
    "multilabel",
    "regression",
    "tokens",
    "with_metric",
]
