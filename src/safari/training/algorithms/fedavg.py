"""FedAvg (McMahan et al., 2017): plain local steps, as in the paper's Algorithm 2."""

from __future__ import annotations

from safari.training.algorithm import ClientAlgorithm


def fedavg() -> ClientAlgorithm:
    """Plain local steps on the task's own loss."""
    return ClientAlgorithm()
