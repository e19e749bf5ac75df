"""Local sparse training (Algorithm 2) and evaluation."""

from safari.training.local import OPTIMISERS, draw_batches, evaluate, train_local

__all__ = ["OPTIMISERS", "draw_batches", "evaluate", "train_local"]
