"""Targets of a regression: learned as numbers around 0, reported in the units in which they were given."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from safari.tasks.task import Task


@dataclass(frozen=True)
class Units:
    """Mean and standard deviation of each number of a label, `[d]`."""

    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, labels: Tensor) -> Units:
        """Units of labels `[n, d]`, each number by its mean and deviation; a constant number has the scale 1.

        >>> units = Units.of(torch.tensor([[1.0, 7.0], [3.0, 7.0]]))
        >>> units.mean.tolist(), units.scale.tolist()
        ([2.0, 7.0], [1.0, 1.0])
        """
        values = labels.double()
        scale = values.std(0, correction=0)
        return cls(values.mean(0).to(labels.dtype), torch.where(scale > 0, scale, 1.0).to(labels.dtype))

    def standardised(self, labels: Tensor) -> Tensor:
        """Labels with mean 0 and standard deviation 1, as far as these are their units."""
        return (labels - self.mean.to(labels)) / self.scale.to(labels)

    def original(self, values: Tensor) -> Tensor:
        """Standardised labels, or outputs of a model that learned from such, in the original units."""
        return values * self.scale.to(values) + self.mean.to(values)

    def tested(self, task: Task) -> Task:
        """The task with tests in the original units; its loss stays the one that is trained."""
        return replace(task, measure=lambda o, y: task.measure(self.original(o), self.original(y)))
