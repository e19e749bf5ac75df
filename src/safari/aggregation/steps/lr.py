"""A server learning rate: x + η Δ, with Δ the change that the weighted sum gave."""

from __future__ import annotations

from torch import Tensor

from safari.aggregation.compensation import Round, State
from safari.aggregation.steps.step import ServerStep
from safari.bounds import above


def lr(*, lr: float = 1.0) -> ServerStep:
    """A server learning rate: the step times `lr`."""
    rate = above("lr", lr, 0)

    def apply(state: State, step: Tensor, round: Round) -> tuple[Tensor, State]:
        return rate * step, state

    return ServerStep(lambda model: {}, apply)
