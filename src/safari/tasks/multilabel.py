"""Any number of labels a sample: binary cross-entropy, micro-averaged F1, average precision."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from safari.errors import ConfigError
from safari.tasks.task import LOSS, Metric, Task, ratio, shape_error, total


def multilabel(*, threshold: float = 0.5) -> Task:
    """Any number of labels a sample, a row of 0 and 1: binary cross-entropy; micro-averaged F1 is the score.

    Outputs are logits `[n, classes]`, labels float32 of the same shape. A label is predicted where its
    probability is above `threshold`. `exact` is the fraction of samples with all labels right; `ap` the
    average precision of the ranking of a sample's labels, averaged over the samples (1 where it has none).

    >>> import torch
    >>> task = multilabel()
    >>> outputs, labels = torch.tensor([[5.0, -5.0, 5.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    >>> task.loss(outputs, labels)
    tensor([1.6734])
    >>> found = task.finish({name: float(v) for name, v in task.measure(outputs, labels).items()})
    >>> round(found["f1"], 4), found["exact"]
    (0.6667, 0.0)
    """
    if not 0 < threshold < 1:
        raise ConfigError(f"threshold must be above 0 and below 1, got {threshold}")

    def measure(outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        truth, guess = labels > 0.5, outputs.sigmoid() > threshold
        return {
            "loss": total(_loss(outputs, labels)),
            "exact": (truth == guess).all(1).sum(),
            "ap": total(_average_precision(outputs, truth)),
            "hits": (truth & guess).sum(),
            "errors": (truth ^ guess).sum(),
        }

    return Task(
        name="multilabel",
        labels="multi-hot",
        loss=_loss,
        measure=measure,
        metrics=(
            Metric("f1", "F1 (micro)", percent=True),
            Metric("ap", "average precision", percent=True),
            Metric("exact", "exact match", percent=True),
            LOSS,
        ),
        score="f1",
        check=_check,
        finish=_finish,
    )


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, labels, reduction="none").mean(1)


def _average_precision(outputs: Tensor, truth: Tensor) -> Tensor:
    """Average precision of each sample.

    The mean, over its true labels, of the share of true ones among the labels ranked as high or higher:
    AP = 1/|T| Σ_{j ∈ T} |{k ∈ T : s_k ≥ s_j}| / |{k : s_k ≥ s_j}|
    """
    above = outputs[:, None, :] >= outputs[:, :, None]
    precision = (above & truth[:, None, :]).sum(2) / above.sum(2).clamp(min=1)
    count = truth.sum(1)
    found = (precision * truth).sum(1) / count.clamp(min=1)
    return torch.where(count > 0, found, torch.ones_like(found))


def _finish(means: Mapping[str, float]) -> dict[str, float]:
    # F1 = 2 TP / (2 TP + FP + FN)
    f1 = ratio(2 * means["hits"], 2 * means["hits"] + means["errors"])
    return {"loss": means["loss"], "f1": f1, "ap": means["ap"], "exact": means["exact"]}


def _check(outputs: Tensor, labels: Tensor, classes: int) -> None:
    if not isinstance(outputs, Tensor) or outputs.shape != labels.shape:
        wanted = f"[{', '.join(map(str, labels.shape))}]"
        raise shape_error(outputs, wanted, f"(a logit for each of {classes} labels)")
