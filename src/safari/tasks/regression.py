"""One number a sample, or several: squared error."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from safari.tasks.task import LOSS, Metric, Task, shape_error, total


def regression(*, standardise: bool = True) -> Task:
    """One number a sample, or several: mean squared error; the mean absolute error is the score.

    Outputs and labels are float32 `[n, numbers]`. With `standardise` models learn labels that are standardised over
    the training set; the errors of a test are in the labels' own units either way.

    >>> import torch
    >>> task = regression()
    >>> outputs, labels = torch.tensor([[1.0], [4.0]]), torch.tensor([[1.0], [2.0]])
    >>> task.loss(outputs, labels)
    tensor([0., 4.])
    >>> task.finish({name: float(v) / 2 for name, v in task.measure(outputs, labels).items()})
    {'loss': 2.0, 'mae': 1.0, 'rmse': 1.4142135623730951}
    """
    return Task(
        name="regression",
        labels="numbers",
        loss=_loss,
        measure=lambda outputs, labels: {
            "loss": total(_loss(outputs, labels)),
            "mae": total((outputs - labels).abs().flatten(1).mean(1)),
        },
        metrics=(
            Metric("mae", "mean absolute error", higher=False),
            Metric("rmse", "root mean squared error", higher=False),
            LOSS,
        ),
        score="mae",
        check=_check,
        finish=_finish,
        logits=False,
        standardise=standardise,
    )


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().flatten(1).mean(1)


def _finish(means: Mapping[str, float]) -> dict[str, float]:
    return {"loss": means["loss"], "mae": means["mae"], "rmse": math.sqrt(means["loss"])}


def _check(outputs: Tensor, labels: Tensor, classes: int) -> None:
    if not isinstance(outputs, Tensor) or outputs.shape != labels.shape:
        wanted = f"[{', '.join(map(str, labels.shape))}]"
        raise shape_error(outputs, wanted, f"(numbers a sample: {classes})")
