"""Which weights stay: scores (one function a pruner) and masks (exact top-k)."""

from safari.pruning.masks import PRUNERS, Pruner, as_pruner, compute_mask, density, kept_count, prune, top_k
from safari.pruning.scores import Batch, Score

__all__ = [
    "PRUNERS",
    "Batch",
    "Pruner",
    "Score",
    "as_pruner",
    "compute_mask",
    "density",
    "kept_count",
    "prune",
    "top_k",
]
