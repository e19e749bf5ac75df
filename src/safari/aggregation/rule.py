"""Rules from their phases, and the weights that most of them begin with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from safari.aggregation.checks import check_weights
from safari.aggregation.compensation import (
    Compensation,
    Decision,
    Init,
    Phases,
    Round,
    State,
    Update,
    Weigh,
    nothing,
    unchanged,
)
from safari.errors import ConfigError


def rule(
    weigh: Weigh | None = None,
    init: Init = nothing,
    *,
    learn: Update = unchanged,
    remember: Update = unchanged,
    estimate: Callable[[State, Round], Tensor] | None = None,
    columns: tuple[str, ...] = (),
) -> Compensation:
    """A rule from its phases, which `Phases` describes; `columns` as in `Compensation`.

    >>> from safari.aggregation import Weights
    >>> mean = rule(lambda state, round, sets: Weights(shares(round, sets)))
    >>> view = Round(
    ...     number=0, global_model=torch.zeros(1), cohort=torch.arange(3), arrived=torch.arange(2),
    ...     models=torch.ones(2, 1), masks=torch.ones(2, 1, dtype=torch.bool),
    ...     weights=torch.tensor([0.125, 0.375, 0.5]), parameters=1)
    >>> mean.apply({}, view)[0].a
    tensor([0.2500, 0.7500])
    """
    phases = Phases(weigh, learn, remember, estimate)

    def apply(state: State, round: Round) -> tuple[Decision, State]:
        learned = learn(state, round)
        return respond(phases, learned, round), remember(own_columns(learned, columns), round)

    return Compensation(init, apply, columns=columns, phases=phases)


def own_columns(state: State, columns: Sequence[str]) -> State:
    """The state with copies of these tensors, into which `remember` may write."""
    return state | {name: state[name].clone() for name in columns}


def respond(phases: Phases, state: State, round: Round, name: str = "the rule") -> Decision:
    """The decision of a rule that has learned, in a round in which models arrived whole."""
    if phases.estimate is not None:
        return _as_next(phases.estimate(state, round), round) if len(round.arrived) else Decision(round.own)
    sets = torch.ones(1, len(round.arrived), dtype=torch.bool)
    weights = None if phases.weigh is None else phases.weigh(state, round, sets)
    if weights is None:
        raise ConfigError(f"{name}: weigh must return Weights where models arrive whole, got None")
    check_weights(name, weights, round, sets)
    device = round.weights.device
    a = weights.a[0].to(device, non_blocking=True)
    names = {}
    if weights.stand_ins is not None:
        names = names_of(weights.clients_of(round), round.arrived_ids, weights.stand_ins[0])
    if weights.b is None or not bool(weights.b.any()):
        return Decision(a, stand_ins=names)
    return Decision(a, weights.b[0].to(device, non_blocking=True), weights.recalled, names)


def _as_next(model: Tensor, round: Round) -> Decision:
    """The decision after which this is the model: it is recalled, with all the weight."""
    none = torch.zeros_like(round.own)
    return Decision(none, none.new_ones(1), model[None], shares=share(round))


def names_of(clients: Sequence[int], arrived: Sequence[int], mixture: Tensor) -> dict[int, tuple[int, ...]]:
    """The stand-ins of each client that has any, largest share first; `mixture[j, i]` is i's share of j's weight."""
    names = {}
    for client, row in zip(clients, mixture.tolist(), strict=True):
        order = sorted((i for i in range(len(row)) if row[i] > 0), key=lambda i: (-row[i], i))
        if order:
            names[client] = tuple(arrived[i] for i in order)
    return names


def share(round: Round) -> Tensor:
    """The arrivals' weights, scaled to sum to 1."""
    weights = round.own
    return weights / weights.sum() if len(weights) else weights


def shares(round: Round, sets: Tensor) -> Tensor:
    """The weights of the arrivals in each of many sets, scaled to sum to 1; 0 where a set is empty."""
    weights = own(round, sets)
    return weights / torch.where(sets.any(1), weights.sum(1), 1.0)[:, None]


def own(round: Round, sets: Tensor) -> Tensor:
    """The arrivals' weights, for each of many sets of arrivals; 0 for those outside the set."""
    return sets * round.weights_on_host[_rows(round)]


def members(round: Round, sets: Tensor) -> Tensor:
    """`bool[sets, cohort]`: is this client in the set of arrivals?"""
    found = torch.zeros(len(sets), len(round.cohort), dtype=torch.bool)
    found[:, _rows(round)] = sets
    return found


def _rows(round: Round) -> Tensor:
    """The arrivals' rows in the cohort, on the host."""
    arrived = set(round.arrived_ids)
    rows = [row for row, client in enumerate(round.cohort_ids) if client in arrived]
    return torch.tensor(rows, dtype=torch.int64)
