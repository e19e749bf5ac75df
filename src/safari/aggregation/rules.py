"""The simple rules and the paper's, and what stand-ins are made of."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from safari.aggregation.compensation import Compensation, Decision, Round, State, Weights
from safari.aggregation.rule import members, names_of, own, rule, shares
from safari.aggregation.similarity import observe, unknown
from safari.errors import ConfigError

# Beyond this the matrix of pairs would not fit: 20,000 clients need 1.6 GB.
MOST_CLIENTS_WITH_PAIRS = 20_000


def drop() -> Compensation:
    """Average what arrived, as FedAvg does; missing clients are left out."""
    return rule(lambda state, round, sets: Weights(shares(round, sets)))


def perfect() -> Compensation:
    """FedAvg on a perfect network: links are overridden and everything arrives."""
    return dataclasses.replace(drop(), overrides_network=True)


def attainable() -> Compensation:
    """An oracle: a perfect network in rounds in which any client arrives; the others are lost.

    No rule for the missing that waits for an arrival can know more. What it lacks to `perfect` is the price of
    rounds in which nobody arrives at all.
    """
    return dataclasses.replace(perfect(), needs_arrival=True)


def safari() -> Compensation:
    """The paper's rule: for each missing client, the most similar that arrived (last seen L2 distance)."""

    def init(clients: int, size: int, device: torch.device) -> State:
        check_pairs("safari", clients)
        return {"similarity": unknown(clients, device)}

    def learn(state: State, round: Round) -> State:
        if len(round.arrived) == 0:
            return state
        part = slice(round.parameters)
        came = None if round.came is None else round.came[:, part]
        models, began = round.models[:, part], round.global_model[part]
        return {"similarity": observe(state["similarity"], round.arrived, models, began, came)}

    def weigh(state: State, round: Round, sets: Tensor) -> Weights:
        return stand_ins(round, sets, state["similarity"])

    return rule(weigh, init, learn=learn)


def stand_in(round: Round, mixture: Tensor) -> Decision:
    """The decision in which arrivals speak for the missing: `mixture[j, i]` is i's share of j's weight.

    Rows belong to `round.missing`, columns to `round.arrived`, and each row sums to 1.
    """
    names = names_of(round.missing_ids, round.arrived_ids, mixture)
    return Decision(round.own + round.others @ mixture, stand_ins=names)


def stand_ins(round: Round, sets: Tensor, similarity: Tensor) -> Weights:
    """The weights with which the most similar arrivals speak for the missing, for many sets of arrivals at once.

    `similarity` holds a number for each pair of clients, NaN where none is known.
    """
    present, a = members(round, sets), own(round, sets)
    rows = (~present).any(0).nonzero()[:, 0]
    if not a.shape[1] or not len(rows):
        return Weights(a)
    clients = round.cohort[rows.to(round.cohort.device, non_blocking=True)]
    seen = similarity[clients][:, round.arrived].cpu()
    among = sets[:, None].expand(-1, *seen.shape)
    missing = among & ~present[:, rows, None]
    mixture = torch.where(missing, most_similar(seen.expand_as(among), among), 0.0)
    return Weights(a + round.weights_on_host[rows] @ mixture, stand_ins=mixture, clients=rows)


def most_similar(seen: Tensor, among: Tensor | None = None) -> Tensor:
    """All the weight on the most similar arrival; shared equally where no similarity is known.

    The last dimension is that of the arrivals; `among` is True for those that count, all by default.
    """
    among = torch.ones_like(seen, dtype=torch.bool) if among is None else among
    known = among & ~seen.isnan()
    best = seen.nan_to_num(nan=-torch.inf).masked_fill(~among, -torch.inf).argmax(-1)
    one = torch.nn.functional.one_hot(best, seen.shape[-1]).to(torch.float64)
    return torch.where(
        known.any(-1, keepdim=True), one, 1.0 / among.sum(-1, keepdim=True, dtype=torch.float64)
    )


def check_pairs(rule: str, clients: int, most: int = MOST_CLIENTS_WITH_PAIRS) -> None:
    """ConfigError when a matrix of all pairs would be too large."""
    if clients > most:
        raise ConfigError(
            f"clients must be at most {most} for the rule {rule}, which remembers every pair; got {clients}"
        )
