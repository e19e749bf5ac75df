"""Samplings: which clients are asked in a round, and the weight of each in the round's sum.

Let p_i be what client i counts for in the average over all clients: its sample count (`aggregation.weights =
"samples"`), or the same as all others. A sampling that draws client i m·p_i times in expectation, out of m
draws, and gives every draw the same weight, has the full average as its expectation, whatever the variance. A
client that is drawn several times trains once, and its upload counts as often as it was drawn.

Whether an answer arrives depends on the network: a client that is drawn and lost is missing, with its
share, and the rule for the missing decides what becomes of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

State = dict[str, Tensor]


@dataclass(frozen=True)
class SamplingRound:
    """All that a sampling knows at the start of a round.

    Args:
        number: the round, from 0.
        cohort: how many draws to make (m).
        weights: what each client counts for in the average over all of them, in any unit, `float64[clients]`;
            0 for a client that cannot be asked in this round.
        rng: fresh in every round.
    """

    number: int
    cohort: int
    weights: NDArray[np.float64]
    rng: np.random.Generator


@dataclass(frozen=True)
class Draw:
    """A round's cohort.

    Args:
        clients: who is asked: ascending, each once.
        shares: what each of them counts for in the round's sum, in the same order; they sum to 1. None: as
            `aggregation.weights` says, over those who are asked.
    """

    clients: tuple[int, ...]
    shares: tuple[float, ...] | None = None

    @classmethod
    def of(cls, drawn: NDArray[np.int64]) -> Draw:
        """From one client for each draw, perhaps with repetitions: every draw counts for the same.

        >>> Draw.of(np.array([4, 1, 4, 7]))
        Draw(clients=(1, 4, 7), shares=(0.25, 0.5, 0.25))
        """
        clients, times = np.unique(drawn, return_counts=True)
        return cls(tuple(clients.tolist()), tuple((times / len(drawn)).tolist()))

    @property
    def by_client(self) -> dict[int, float] | None:
        """The shares by client."""
        return None if self.shares is None else dict(zip(self.clients, self.shares, strict=True))


def nothing(clients: int, parameters: int, device: torch.device) -> State:
    """The state of a sampling that has none."""
    return {}


@dataclass(frozen=True)
class Sampling:
    """`apply(state, round) -> (draw, state)` at the start of a round; `init(clients, parameters, device) -> state`.

    `learn(state, ids, updates) -> state`, where there is one, is told at the end of a round what arrived and was
    not refused: client ids, `int64[n]`, ascending, and what each of these clients changed in the parameters of
    the model that it was sent, `float32[n, parameters]`, 0 where its mask cuts. Of a client whose upload was lost
    the server hears nothing. The state is a dict of tensors, which checkpoints can hold.
    """

    apply: Callable[[State, SamplingRound], tuple[Draw, State]]
    init: Callable[[int, int, torch.device], State] = nothing
    learn: Callable[[State, Tensor, Tensor], State] | None = None
