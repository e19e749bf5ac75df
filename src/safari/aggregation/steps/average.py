"""A running average of the global models: what a server can test and give away beside the newest of them.

A round that hears few clients moves the model by much that is noise. Training needs the newest model; whoever
uses the result does not, and in an average over rounds most of the noise is gone.
"""

from __future__ import annotations

from torch import Tensor, lerp

from safari.aggregation.compensation import Round, State
from safari.aggregation.steps.step import ServerStep
from safari.errors import ConfigError

# The name of the average in the step's state; `Server.average` looks for it.
AVERAGE = "running_average"


def kept_share(done: int, most: float) -> float:
    """The weight that the past has in the average when `done` models are in it already.

    The plain mean of all models so far, until the past would weigh more than `most`; from then on the past
    keeps `most`, and a model counts less with every round that goes by. The model before the first round is
    random and never part of it.

    >>> [round(kept_share(done, 0.75), 3) for done in range(6)]
    [0.0, 0.5, 0.667, 0.75, 0.75, 0.75]
    """
    return min(most, done / (done + 1))


def running_average(past: Tensor, model: Tensor, done: int, most: float) -> Tensor:
    """The average with one more model in it. All numbers of it: buffers, too.

    >>> import torch
    >>> models = [torch.tensor([x]) for x in (1.0, 3.0, 5.0)]
    >>> average = torch.tensor([99.0])
    >>> for done, model in enumerate(models):
    ...     average = running_average(average, model, done, most=0.5)
    >>> average                                                  # (1 + 3) / 2, then (2 + 5) / 2
    tensor([3.5000])
    """
    return lerp(model, past, kept_share(done, most))


def average(*, most: float = 0.9) -> ServerStep:
    """A running average of the models beside the newest one; training is the same with and without it.

    `most`: the weight that the past keeps in each round; until then the plain mean.
    """
    if not 0 < most < 1:
        raise ConfigError(f"most must lie above 0 and below 1, got {most}")

    def apply(state: State, step: Tensor, round: Round) -> tuple[Tensor, State]:
        return step, state

    def observe(state: State, model: Tensor, round: Round) -> State:
        return {AVERAGE: running_average(state[AVERAGE], model, round.number, most)}

    return ServerStep(lambda model: {AVERAGE: model}, apply, observe)
