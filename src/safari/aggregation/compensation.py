"""What the server does about the clients that are missing: a pair of pure functions, one linear form.

With the models x_i that arrived and the global model x, every rule is

    x_next = x + Σ_i a_i (x_i - x) + Σ_j b_j (z_j - x)

where z_j is what the rule takes client j to have sent, from its memory of updates: z_j = x + y_j. So a rule
only says how much of each it wants. Where the weights do not sum to 1, something of x itself is left; that
part is kept within what the arrivals kept, so that a weight which all of them cut is cut, as in their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

State = dict[str, Tensor]

# Weights that sum to 1 up to rounding leave nothing of the old model: a weight cut by all becomes exactly 0.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Round:
    """All that a server knows in a round: whom it asked, who arrived, with what. No link, no probability.

    `cohort` and `arrived` are ascending client ids, `models[i]` is the model of `arrived[i]`, `weights`
    are those of the cohort and sum to 1. The first `parameters` numbers of a model are its parameters,
    the rest are buffers.
    """

    number: int
    global_model: Tensor
    cohort: Tensor
    arrived: Tensor
    models: Tensor
    weights: Tensor
    parameters: int

    @property
    def present(self) -> Tensor:
        """A bool for each of the cohort: did it arrive?"""
        return torch.isin(self.cohort, self.arrived)

    @property
    def missing(self) -> Tensor:
        """The ids that were asked and did not arrive, ascending."""
        return self.cohort[~self.present]


@dataclass(frozen=True)
class Decision:
    """A rule's answer: the weights of the arrivals, of the models it recalls, and who stood in for whom."""

    a: Tensor
    b: Tensor | None = None
    recalled: Tensor | None = None
    stand_ins: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Compensation:
    """`init(clients, size, device) -> state`; `apply(state, round) -> (decision, state)`.

    `overrides_network` marks the reference arm in which nothing is ever lost.
    """

    init: Callable[[int, int, torch.device], State]
    apply: Callable[[State, Round], tuple[Decision, State]]
    overrides_network: bool = False


def combine(round: Round, decision: Decision) -> Tensor:
    """The weighted sum that every rule ends in."""
    x = round.global_model
    rest = 1.0 - float(decision.a.sum()) - (0.0 if decision.b is None else float(decision.b.sum()))
    out = torch.zeros_like(x)
    if len(decision.a):
        out = decision.a.to(x.dtype) @ round.models
    if decision.b is not None and decision.recalled is not None:
        out = out + decision.b.to(x.dtype) @ decision.recalled
    if abs(rest) < _ROUNDING:
        return out
    return out + rest * (x * (round.models != 0).any(0) if len(round.models) else x)
