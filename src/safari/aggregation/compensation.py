"""What the server does about the clients that are missing: a pair of pure functions, one linear form.

With the models x_i that arrived and the global model x, every rule is

    x_next = x + Σ_i a_i (x_i - x) + Σ_j b_j (z_j - x)

where z_j is what the rule takes client j to have sent, from its memory of updates: z_j = x + y_j. So a rule
only says how much of each it wants. Where the weights do not sum to 1, something of x itself is left; that
part is kept within what the arrivals kept, so that a weight which all of them cut is cut, as in their mean.

Buffers follow the sum while it is a mean, that is while no weight is negative, the one left to x included.
They are statistics, not steps: a running variance that goes beyond all that was seen may fall below 0. Where
a sum is no mean, negative weights count as 0 for the buffers, and the others are scaled to sum to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

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
    """The weighted sum that every rule ends in; for buffers a mean.

    >>> view = Round(
    ...     number=0, global_model=torch.tensor([1.0, 1.0]), cohort=torch.arange(2), arrived=torch.arange(2),
    ...     models=torch.tensor([[2.0, 0.5], [2.0, 0.1]]), weights=torch.tensor([0.5, 0.5]), parameters=1)
    >>> combine(view, Decision(a=torch.tensor([1.0, 1.0])))   # two steps of 1; (0.5 + 0.1) / 2
    tensor([3.0000, 0.3000])
    """
    weights = [decision.a] if decision.b is None else [decision.a, decision.b]
    # The one look at the device.
    looks = torch.stack([look for w in weights for look in (w.sum(), w.clamp(max=0).sum())]).tolist()
    rest = 1.0 - looks[0] - sum(looks[2::2])
    rest = 0.0 if abs(rest) < _ROUNDING else rest
    out = _weighted_sum(round, decision, rest, slice(None))
    negative = sum(looks[1::2]) + min(rest, 0.0)
    if not negative or round.parameters == len(out):
        return out
    positive = replace(
        decision, a=decision.a.clamp(min=0), b=None if decision.b is None else decision.b.clamp(min=0)
    )
    # With the negative ones the weights sum to 1.
    buffers = _weighted_sum(round, positive, max(rest, 0.0), slice(round.parameters, None)) / (1 - negative)
    return torch.cat([out[: round.parameters], buffers])


def _weighted_sum(round: Round, decision: Decision, rest: float, part: slice) -> Tensor:
    x, models = round.global_model[part], round.models[:, part]
    out = torch.zeros_like(x)
    if len(decision.a):
        out = decision.a.to(x.dtype) @ models
    if decision.b is not None and decision.recalled is not None:
        out = out + decision.b.to(x.dtype) @ decision.recalled[:, part]
    if not rest:
        return out
    return out + rest * (x * (models != 0).any(0) if len(models) else x)
