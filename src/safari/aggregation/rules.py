"""The simple rules and the paper's, and what stand-ins are made of."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from safari.aggregation.compensation import BlockWeights, Compensation, Decision, Round, State, learning
from safari.aggregation.similarity import observe, unknown
from safari.errors import ConfigError

# Beyond this the matrix of pairs would not fit: 20,000 clients need 1.6 GB.
MOST_CLIENTS_WITH_PAIRS = 20_000


def drop() -> Compensation:
    """Average what arrived, as FedAvg does; missing clients are left out."""

    def apply(state: State, round: Round) -> tuple[Decision, State]:
        return Decision(share(round)), state

    def weigh(state: State, round: Round, sets: Tensor) -> BlockWeights:
        return BlockWeights(shares(round, sets))

    return Compensation(lambda clients, size, device: {}, apply, weigh=weigh)


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

    def respond(state: State, round: Round) -> tuple[Decision, State]:
        if len(round.arrived) == 0:
            return Decision(share(round)), state
        seen = state["similarity"][round.missing][:, round.arrived]
        return stand_in(round, most_similar(seen)), state

    def weigh(state: State, round: Round, sets: Tensor) -> BlockWeights:
        return stand_ins(round, sets, state["similarity"])

    return learning(init, learn, respond, weigh=weigh)


def stand_in(round: Round, mixture: Tensor) -> Decision:
    """The decision in which arrivals speak for the missing: `mixture[j, i]` is i's share of j's weight.

    Rows belong to `round.missing`, columns to `round.arrived`, and each row sums to 1.
    """
    return Decision(round.own + round.others @ mixture, stand_ins=names_of(round, mixture))


def stand_ins(round: Round, sets: Tensor, similarity: Tensor) -> BlockWeights:
    """What `stand_in` decides with the most similar arrivals, for many sets of arrivals at once.

    `similarity` holds a number for each pair of clients, NaN where none is known.
    """
    seen = similarity[round.cohort][:, round.arrived].cpu()
    weights = round.weights.cpu()
    among = sets[:, None].expand(-1, *seen.shape)
    spoken_for = among & ~members(round, sets)[:, :, None]
    mixture = torch.where(spoken_for, most_similar(seen.expand_as(among), among), 0.0)
    return BlockWeights(own(round, sets) + weights @ mixture, stand_ins=mixture > 0)


def names_of(round: Round, mixture: Tensor) -> dict[int, tuple[int, ...]]:
    """The stand-ins of each missing client, largest share first; clients without any are left out."""
    arrived = round.arrived_ids
    names = {}
    for client, row in zip(round.missing_ids, mixture.tolist(), strict=True):
        order = sorted((i for i in range(len(row)) if row[i] > 0), key=lambda i: (-row[i], i))
        if order:
            names[client] = tuple(arrived[i] for i in order)
    return names


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


def share(round: Round) -> Tensor:
    """The arrivals' weights, scaled to sum to 1."""
    weights = round.own
    return weights / weights.sum() if len(weights) else weights


def shares(round: Round, sets: Tensor) -> Tensor:
    """The same for each of many sets of arrivals; 0 where a set is empty."""
    weights = own(round, sets)
    return weights / torch.where(sets.any(1), weights.sum(1), 1.0)[:, None]


def own(round: Round, sets: Tensor) -> Tensor:
    """The arrivals' weights, for each of many sets of arrivals; 0 for those outside the set."""
    return sets * round.own.cpu()


def members(round: Round, sets: Tensor) -> Tensor:
    """`bool[sets, cohort]`: is this client in the set of arrivals?"""
    found = torch.zeros(len(sets), len(round.cohort), dtype=torch.bool)
    arrived = set(round.arrived_ids)
    found[:, torch.tensor([client in arrived for client in round.cohort_ids])] = sets
    return found


def check_pairs(rule: str, clients: int, most: int = MOST_CLIENTS_WITH_PAIRS) -> None:
    """ConfigError when a matrix of all pairs would be too large."""
    if clients > most:
        raise ConfigError(
            f"clients must be at most {most} for the rule {rule}, which remembers every pair; got {clients}"
        )
