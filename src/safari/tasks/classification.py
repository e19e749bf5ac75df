"""One class a sample: cross-entropy, top-1 and top-5 accuracy."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from safari.tasks.task import LOSS, Metric, Task, shape_error

TOP = 5


def classification() -> Task:
    """One class a sample: cross-entropy; top-1 accuracy is the score, top-5 where there are more than five.

    >>> import torch
    >>> task = classification()
    >>> outputs, labels = torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1])
    >>> task.loss(outputs, labels)
    tensor([0.1269, 0.6931])
    >>> task.measure(outputs, labels)["top1"]
    tensor(1)
    """
    return Task(
        name="classification",
        labels="class",
        loss=_loss,
        measure=_measure,
        metrics=(
            Metric("top1", "top-1 accuracy", percent=True, short="top-1"),
            Metric("top5", "top-5 accuracy", percent=True, short="top-5"),
            LOSS,
        ),
        score="top1",
        check=_check,
        mean=F.cross_entropy,
        by_class=_by_class,
    )


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")


def _measure(outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    best = outputs.topk(min(TOP, outputs.shape[1]), dim=1).indices == labels[:, None]
    found = {"loss": F.cross_entropy(outputs, labels, reduction="sum"), "top1": best[:, 0].sum()}
    # With five classes or fewer every answer is among the best five.
    return {**found, "top5": best.sum()} if outputs.shape[1] > TOP else found


def _by_class(outputs: Tensor, labels: Tensor, classes: int) -> Tensor:
    return labels[outputs.argmax(1) == labels].bincount(minlength=classes)


def _check(outputs: Tensor, labels: Tensor, classes: int) -> None:
    fits = isinstance(outputs, Tensor) and outputs.ndim == 2 and len(outputs) == len(labels)
    if not fits or outputs.shape[1] < classes:
        n = len(labels)
        raise shape_error(outputs, f"[{n}, at least {classes}]", f"for {n} samples of {classes} classes")
