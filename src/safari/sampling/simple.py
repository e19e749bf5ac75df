"""Samplings that look at one client at a time: without replacement, and by weight with it."""

from __future__ import annotations

import numpy as np

from safari.sampling.sampling import Draw, Sampling, SamplingRound, State


def uniform() -> Sampling:
    """Different clients, every set of them as likely as any other; weighted among themselves."""

    def apply(state: State, round: SamplingRound) -> tuple[Draw, State]:
        there = np.flatnonzero(round.weights)
        if round.cohort >= len(there):
            return Draw(tuple(there.tolist())), state
        drawn = there[round.rng.choice(len(there), round.cohort, replace=False)]
        return Draw(tuple(sorted(drawn.tolist()))), state

    return Sampling(apply)


def multinomial() -> Sampling:
    """MD sampling: independent draws with replacement, each by what the clients count for in the average.

    Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020: m draws l_k ~ p, and the round's
    sum is (1/m) Σ_k x_{l_k}. Unbiased; the variance of how often client i is drawn is m p_i (1 - p_i).
    """

    def apply(state: State, round: SamplingRound) -> tuple[Draw, State]:
        p = round.weights / round.weights.sum()
        return Draw.of(round.rng.choice(len(p), round.cohort, p=p)), state

    return Sampling(apply)
