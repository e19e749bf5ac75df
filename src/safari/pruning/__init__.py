"""Pruning: scores (one function a pruner), scopes, schedules, and masks (exact top-k)."""

from safari.pruning.budget import Budget, kept_count, select, top_k
from safari.pruning.kinds import POLICIES
from safari.pruning.masks import (
    PRUNERS,
    Pruner,
    as_pruner,
    compute_mask,
    density,
    for_task,
    prune,
    settled_mask,
)
from safari.pruning.policy import Arrivals, MaskPolicy, MaskRound, Masks
from safari.pruning.schedule import SCHEDULES, sparsity_at
from safari.pruning.scope import SCOPES, budget_for, weight_entries
from safari.pruning.scores import Batch, Score

__all__ = [
    "POLICIES",
    "PRUNERS",
    "SCHEDULES",
    "SCOPES",
    "Arrivals",
    "Batch",
    "Budget",
    "MaskPolicy",
    "MaskRound",
    "Masks",
    "Pruner",
    "Score",
    "as_pruner",
    "budget_for",
    "compute_mask",
    "density",
    "for_task",
    "kept_count",
    "prune",
    "select",
    "settled_mask",
    "sparsity_at",
    "top_k",
    "weight_entries",
]
