"""The local loss of HeteroFL's public code (Diao et al., ICLR 2021): labels a client lacks are masked."""

from __future__ import annotations

from torch import Tensor

from safari.tasks import Task
from safari.training.algorithm import ClientAlgorithm, Known, needs_classes, per_sample


def masked_loss() -> ClientAlgorithm:
    """HeteroFL's masked cross-entropy: logits of labels that the client does not have are 0 in its loss.

    The paper says that it follows HeteroFL's division of the data; HeteroFL's code trains with this loss, and
    tests with statistics of batch norms that are gathered anew (`evaluation.norms = "gathered"`). Nothing is
    kept and nothing travels beside the model, so a lost message changes nothing.
    """

    def loss(outputs: Tensor, labels: Tensor, known: Known, task: Task) -> Tensor:
        lacks = known.label_counts == 0
        kept = outputs.clone()
        kept[..., : lacks.shape[1]] = kept[..., : lacks.shape[1]].masked_fill(lacks[:, None], 0.0)
        return per_sample(task, kept, labels)

    return ClientAlgorithm(loss=loss, check=needs_classes("masked-loss"), counts_labels=True)
