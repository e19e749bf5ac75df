"""A label for each token of a sequence, such as the next one: cross-entropy, perplexity, accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from safari.tasks.task import LOSS, Metric, Task, ratio, shape_error, total


def tokens(*, ignore: int = -100) -> Task:
    """A label for each token: next-token prediction or tagging; perplexity is the score, beside accuracy.

    Outputs are `[n, length, classes]`, labels int64 `[n, length]`; a label of `ignore` does not count
    (padding). A sample's loss is the mean over its own tokens; perplexity and accuracy weight every token of
    the test set alike.

    >>> import torch
    >>> task = tokens()
    >>> labels = torch.tensor([[0, 1, -100]])
    >>> task.loss(torch.zeros(1, 3, 4), labels)
    tensor([1.3863])
    >>> means = {name: float(value) for name, value in task.measure(torch.zeros(1, 3, 4), labels).items()}
    >>> {name: round(value, 4) for name, value in task.finish(means).items()}
    {'loss': 1.3863, 'perplexity': 4.0, 'accuracy': 0.5}
    """

    def each(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(outputs.transpose(1, 2), labels, ignore_index=ignore, reduction="none")
        return loss, labels != ignore

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        found, counted = each(outputs, labels)
        return found.sum(1) / counted.sum(1).clamp(min=1)

    def measure(outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found, counted = each(outputs, labels)
        right = (outputs.argmax(2) == labels) & counted
        return {"loss": total(found), "accuracy": right.sum(), "tokens": counted.sum()}

    def check(outputs: Tensor, labels: Tensor, classes: int) -> None:
        fits = isinstance(outputs, Tensor) and outputs.ndim == 3 and outputs.shape[:2] == labels.shape
        if not fits or outputs.shape[2] < classes:
            wanted = f"[{', '.join(map(str, labels.shape))}, at least {classes}]"
            raise shape_error(outputs, wanted, f"(a score for each of {classes} tokens at each position)")

    return Task(
        name="tokens",
        labels="tokens",
        loss=loss,
        measure=measure,
        metrics=(
            Metric("perplexity", "perplexity", higher=False),
            Metric("accuracy", "token accuracy", percent=True),
            LOSS,
        ),
        score="perplexity",
        check=check,
        finish=_finish,
    )


def _finish(means: Mapping[str, float]) -> dict[str, float]:
    loss = ratio(means["loss"], means["tokens"])
    # exp overflows above 709: a diverged model's perplexity is infinite, not an error.
    perplexity = math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan
    return {"loss": loss, "perplexity": perplexity, "accuracy": ratio(means["accuracy"], means["tokens"])}
