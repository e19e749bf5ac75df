"""The contract of a task, and how to add a metric of your own to one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from safari.errors import ConfigError

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Measure: TypeAlias = Callable[[Tensor, Tensor], Mapping[str, Tensor]]
Finish: TypeAlias = Callable[[Mapping[str, float]], Mapping[str, float]]
ByClass: TypeAlias = Callable[[Tensor, Tensor, int], Tensor]
Check: TypeAlias = Callable[[Tensor, Tensor, int], None]

LabelKind = Literal["class", "tokens", "multi-hot", "numbers"]


@dataclass(frozen=True)
class Metric:
    """Description of one number that a test yields.

    Parameters
    ----------
    name: the key in records, such as "top1".
    label: what tables, axes and reports print, such as "top-1 accuracy".
    percent: a fraction that is shown as a percentage.
    higher: whether higher values are better.
    short: a shorter label, for headings of tables; the label itself where it is empty.
    """

    name: str
    label: str
    percent: bool = False
    higher: bool = True
    short: str = ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(f"a metric's name must be an identifier, got {self.name!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a run's folder, so that showing a run does not import its task."""
        return asdict(self)


LOSS = Metric("loss", "loss", higher=False)


def _same(means: Mapping[str, float]) -> Mapping[str, float]:
    return means


@dataclass(frozen=True)
class Task:
    """Definition of what is learned. All functions are pure and take outputs `[n, ...]` and labels `[n, ...]`.

    Parameters
    ----------
    name: for records and messages.
    labels: what one label is: "class" (int64, one number), "tokens" (int64[L]), "multi-hot" (float32[C]) or
        "numbers" (float32[D]).
    loss: `(outputs, labels) -> float[n]`, the loss of each sample. It must run under autograd and
        `torch.vmap`, so its control flow may depend on shapes but not on values.
    measure: `(outputs, labels) -> {name: sum over the batch}`, scalars of any dtype; "loss" is among them.
    metrics: descriptions of what a test finds, in the order in which tables show them. `measure` may leave
        some out: top-5 accuracy does not exist for three classes.
    score: the name of the metric that ranks models.
    check: `(outputs, labels, classes) -> None`; raises ConfigError when they do not fit together.
    finish: the means over all samples of what `measure` summed up -> the metrics. For what is not a mean:
        perplexity, F1.
    mean: the mean of `loss` over a batch, where torch has one that rounds in its own way.
    logits: the outputs are logits, so that dividing them by a temperature makes sense (GraSP).
    standardise: models learn labels that are standardised over the training set, and are tested in the labels' own
        units; for labels that are numbers.
    by_class: `(outputs, labels, classes) -> int[classes]`, how many samples of each class are right; for tasks with one
        class a sample.
    """

    name: str
    labels: LabelKind
    loss: Loss
    measure: Measure
    metrics: tuple[Metric, ...]
    score: str
    check: Check
    finish: Finish = _same
    mean: Loss | None = None
    logits: bool = True
    standardise: bool = False
    by_class: ByClass | None = None

    def __post_init__(self) -> None:
        names = [metric.name for metric in self.metrics]
        if len(set(names)) < len(names):
            raise ConfigError(f"{self.name}: metrics must have different names, got {', '.join(names)}")
        if self.standardise and self.labels != "numbers":
            raise ConfigError(f"{self.name}: standardise needs labels that are numbers, got {self.labels!r}")
        if self.score not in names:
            raise ConfigError(
                f"{self.name}: score must be one of its metrics ({', '.join(names)}), got {self.score!r}"
            )

    def mean_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of a batch, a scalar."""
        return self.loss(outputs, labels).mean() if self.mean is None else self.mean(outputs, labels)

    def metric(self, name: str) -> Metric:
        """The description of a metric."""
        return next(metric for metric in self.metrics if metric.name == name)


def with_metric(
    task: Task,
    metric: Metric | str,
    values: Callable[[Tensor, Tensor], Tensor],
    *,
    score: bool = False,
) -> Task:
    """The task with one more metric: the mean of `values(outputs, labels)` over all samples.

    `values` gives a number a sample, `[n]`, or their sum. `score`: make it the one that ranks models.

    >>> from safari.tasks import classification
    >>> def confidence(outputs, labels):
    ...     return outputs.softmax(1).amax(1)
    >>> task = with_metric(classification(), Metric("confidence", "confidence", percent=True), confidence)
    >>> [metric.name for metric in task.metrics]
    ['top1', 'top5', 'loss', 'confidence']
    >>> float(task.measure(torch.zeros(3, 4), torch.tensor([0, 1, 2]))["confidence"])
    0.75
    """
    described = Metric(metric, metric) if isinstance(metric, str) else metric
    name = described.name

    def measure(outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        found = values(outputs, labels)
        # A row of numbers a sample would be summed up to something that looks like a mean.
        if not isinstance(found, Tensor) or found.shape not in ((), (len(labels),), (len(labels), 1)):
            shape = f"shape {[*found.shape]}" if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(
                f"metric {name} must be a tensor with a number a sample, shape [{len(labels)}], or their sum; "
                f"got {shape}"
            )
        return {**task.measure(outputs, labels), name: found.sum()}

    def finish(means: Mapping[str, float]) -> Mapping[str, float]:
        return {**task.finish({k: v for k, v in means.items() if k != name}), name: means[name]}

    return replace(
        task,
        measure=measure,
        finish=finish,
        metrics=(*task.metrics, described),
        score=name if score else task.score,
    )


def shape_error(outputs: object, wanted: str, meaning: str) -> ConfigError:
    """Error with the shape that a model must return for a task, and the one that it returned."""
    found = f"shape {[*outputs.shape]}" if isinstance(outputs, Tensor) else type(outputs).__name__
    return ConfigError(f"must return a tensor of shape {wanted} {meaning}, got {found}")


def ratio(part: float, whole: float) -> float:
    """part / whole; NaN where there is nothing.

    >>> ratio(1.0, 4.0), ratio(0.0, 0.0)
    (0.25, nan)
    """
    return part / whole if whole else math.nan


def total(values: Tensor) -> Tensor:
    """The sum of a batch in float64: many small numbers add up without a loss."""
    return values.sum(dtype=torch.float64)
