"""Rules that bound what hostile clients can do to the sum. Missing clients are left out, as with drop.

They need more honest than hostile arrivals, and pay for it: where honest clients differ, what lies far out
may be the only voice of its data.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from safari.aggregation.checks import whole
from safari.aggregation.compensation import Compensation, Round, State, Weights
from safari.aggregation.rule import rule, share, shares
from safari.bounds import above, below, within

# Finite, so that weights exist even where all arrivals are huge.
_FARTHEST = 1e300


def trimmed_mean(*, trim: float = 0.2) -> Compensation:
    """Coordinate-wise trimmed mean (2018): of each number the largest and the smallest values are left out.

    Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018. With n
    arrivals and x_(1) ≤ ... ≤ x_(n) their values of one coordinate,

        x_next = 1/(n - 2k) · Σ_{k < i ≤ n - k} x_(i),   k = min(⌈trim · n⌉, ⌊(n - 1)/2⌋)

    `trim`: the part that is left out at each end, which should be at least that of hostile arrivals; in the
    extreme the median remains. As published, clients count the same whatever their weights.
    """
    below("trim", trim, 0.5)

    def estimate(state: State, round: Round) -> Tensor:
        count = len(round.arrived)
        # Beyond the rounding of trim · n.
        cut = min(math.ceil(trim * count - 1e-9), (count - 1) // 2)
        middle = round.models.sort(0).values[cut : count - cut]
        # Divided first, so that the sum of large numbers stays finite.
        return (middle / len(middle)).sum(0)

    return rule(estimate=estimate)


def geometric_median(*, iterations: int = 10, smoothing: float = 1e-6) -> Compensation:
    """Geometric median (RFA, 2022): the point with the smallest sum of distances to the arrivals.

    Pillutla, Kakade and Harchaoui, "Robust Aggregation for Federated Learning", IEEE TSP 2022: minimise
    Σ_i w_i ‖v - x_i‖ by the smoothed Weiszfeld algorithm, from v = x, the global model:

        a_i ∝ w_i / max(ν, ‖v - x_i‖),   v ← Σ_i a_i x_i

    `iterations`: how often. `smoothing`: ν. Distances are over the parameters; buffers have the same weights.
    """
    iterations = within("iterations", whole("iterations", iterations), 1, 1000)
    above("smoothing", smoothing, 0)

    def init(clients: int, size: int, device: torch.device) -> State:
        # How far each client's latest model was from the median; NaN: never heard.
        return {"apart": torch.full((clients,), torch.nan, dtype=torch.float64, device=device)}

    def learn(state: State, round: Round) -> State:
        apart = _apart(round, iterations, smoothing)
        return {"apart": state["apart"].index_copy(0, round.arrived, apart)}

    def weigh(state: State, round: Round, sets: Tensor) -> Weights:
        a = shares(round, sets) / state["apart"][round.arrived].cpu()
        return Weights(a / torch.where(sets.any(1), a.sum(1), 1.0)[:, None])

    return rule(weigh, init, learn=learn)


def _apart(round: Round, iterations: int, smoothing: float) -> Tensor:
    """Each arrival's distance from their geometric median, as the last iteration sees it, in float64.

    Where parts of models arrived: over what came, scaled up to a whole model.
    """
    models, v = round.models[:, : round.parameters], round.global_model[: round.parameters]
    came, weights = None, share(round)
    scale = weights.new_ones(len(weights))
    if round.came is not None:
        came = round.came[:, : round.parameters]
        scale = (round.parameters / came.sum(1).clamp(min=1)).sqrt().to(weights.dtype)
    apart = scale
    for _ in range(iterations):
        step = models - v if came is None else torch.where(came, models - v, 0.0)
        # The distance of a huge model is infinite in float32, and its weight next to nothing.
        apart = (torch.linalg.vector_norm(step, dim=1).double() * scale).clamp(smoothing, _FARTHEST)
        a = weights / apart
        a = (a / a.sum()).to(models.dtype) if len(a) else a.to(models.dtype)
        if came is None:
            v = a @ models
        else:
            heard = a @ came.to(models.dtype)
            v = torch.where(heard > 0, a @ (models * came) / heard, v)
    return apart
