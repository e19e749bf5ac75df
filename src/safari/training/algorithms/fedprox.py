"""FedProx (Li et al., MLSys 2020): local steps that stay near the global model."""

from __future__ import annotations

from torch import Tensor

from safari.bounds import at_least
from safari.training.algorithm import ClientAlgorithm, LocalRound, State


def fedprox(*, mu: float = 0.01) -> ClientAlgorithm:
    """FedProx: the loss has a term μ/2 · ‖w - x‖², so a step follows g + μ (w - x).

    x is the global model inside the client's mask. Nothing is kept and nothing travels beside the model, so a
    lost message changes nothing. `mu`: the strength of the pull.
    """
    at_least("mu", mu, 0, finite=True)

    def direction(gradient: Tensor, local: LocalRound) -> tuple[Tensor, State]:
        return gradient + mu * (local.model - local.start), local.state

    return ClientAlgorithm(direction=direction)
