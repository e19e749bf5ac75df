"""Local sparse training (Algorithm 2), client algorithms, and evaluation."""

from safari.training.algorithm import (
    ClientAlgorithm,
    Known,
    LocalRound,
    Scaled,
    ServerHalf,
    needs_classes,
    per_sample,
)
from safari.training.kinds import CLIENTS
from safari.training.local import OPTIMISERS, ClientSide, Scores, Trained, draw_batches, evaluate, train_local
from safari.training.norms import batch_norms, gather_norms
from safari.training.schedule import LR_SCHEDULES, lr_at

__all__ = [
    "CLIENTS",
    "LR_SCHEDULES",
    "OPTIMISERS",
    "ClientAlgorithm",
    "ClientSide",
    "Known",
    "LocalRound",
    "Scaled",
    "Scores",
    "ServerHalf",
    "Trained",
    "batch_norms",
    "draw_batches",
    "evaluate",
    "gather_norms",
    "lr_at",
    "needs_classes",
    "per_sample",
    "train_local",
]
