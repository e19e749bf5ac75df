"""Fresh updates against remembered ones, by one number.

Rodio and Neglia, "FedStale: leveraging stale client updates in federated learning", 2024 (arXiv:2405.04171). The
step is a convex combination of FedAvg's, which knows only what arrived, and FedVARP's, in which the last update of
every client counts in full:

    x + (1 - β) Σ_{i arrived} w̃_i Δ_i + β [Σ_{i arrived} w̃_i (Δ_i - y_i) + Σ_j w_j y_j]
      = x + Σ_{i arrived} w̃_i (Δ_i - β y_i) + β Σ_j w_j y_j

with β between 0 and 1; y_j is client j's last update, and w̃ are the arrivals' weights, scaled to sum to 1. The less
often some clients arrive, the older is what is remembered of them, and the smaller β should be.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from safari.aggregation.compensation import Compensation, Round, State, Weights
from safari.aggregation.memory import COLUMNS, blank, recall, remember
from safari.aggregation.rivals import corrected
from safari.aggregation.rule import rule, shares
from safari.bounds import within


def fedstale(*, beta: float = 0.5) -> Compensation:
    """FedStale (2024): x + Σ_{i arrived} w̃_i (Δ_i - β y_i) + β Σ_j w_j y_j; β = 0 is `drop`, 1 is `fedvarp`."""
    within("beta", beta, 0, 1)

    def weigh(state: State, round: Round, sets: Tensor) -> Weights:
        found = corrected(round, sets, shares(round, sets), recall(state, round, round.cohort))
        return found if found.b is None else replace(found, b=beta * found.b)

    return rule(weigh, blank, remember=remember, columns=COLUMNS)
