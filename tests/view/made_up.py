from __future__ import annotations

from typing import Any


def record(number: int, **changes: Any) -> dict[str, Any]:
    """A round in which clients 0 and 1 of three arrived and 0 stood in for 2."""
    return {
        "round": number, "loss": 2.0, "top1": 0.5, "top5": 0.75, "train_loss": 1.0,
        "trained": [0, 1, 2], "arrived": [0, 1], "missing": [2], "refused": {}, "stand_ins": {"2": [0]},
        "lost": False, "density": 0.2, "agreement": 1.0, "support": 0.2, "churn": 0.0,
        "layers": {"1.weight": 0.25, "3.weight": 0.125}, "layer_churn": {"3.weight": 0.5},
        "bytes": {"up": 100.0, "down": None},
    } | changes  # fmt: skip
