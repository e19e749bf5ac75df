"""Logit calibration, in the manner of FedLC (Zhang et al., ICML 2022)."""

from __future__ import annotations

from torch import Tensor

from safari.bounds import at_least, positive_share
from safari.tasks import Task
from safari.training.algorithm import ClientAlgorithm, Known, needs_classes, per_sample


def calibrated(*, strength: float = 0.5, smoothing: float = 0.001) -> ClientAlgorithm:
    """Logits of labels that a client hardly has are lowered in its loss: z_y + strength · log(q_y + ε).

    q_y is the share of label y in the client's own data, ε is `smoothing`. A client then learns to tell its labels
    apart without learning that there are no others: the pull of its local steps towards its own labels is gone from
    the loss. FedLC lowers a logit by τ · n_y^(-1/4), which has no value for a label that a client does not have. The
    model itself is tested as it is. Nothing is kept and nothing travels beside the model, so a lost message changes
    nothing.

    `strength`: 0 is plain cross-entropy, 1 the full prior. `smoothing`: the share of a label that never
    occurs.
    """
    at_least("strength", strength, 0, finite=True)
    positive_share("smoothing", smoothing)

    def loss(outputs: Tensor, labels: Tensor, known: Known, task: Task) -> Tensor:
        counts = known.label_counts
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
        prior = strength * (shares + smoothing).log()
        # A model may have more outputs than there are classes: those stay as they are.
        shifted = outputs.clone()
        shifted[..., : prior.shape[1]] += prior[:, None]
        return per_sample(task, shifted, labels)

    return ClientAlgorithm(loss=loss, check=needs_classes("calibrated"), counts_labels=True)
