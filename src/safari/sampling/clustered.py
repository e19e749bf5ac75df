"""Clustered sampling: one draw from each of m distributions over the clients.

Fraboni, Vidal, Kameni and Lorenzi, "Clustered Sampling: Low-Variance and Improved Representativity for Clients
Selection in Federated Learning", ICML 2021. Client i has the probability r_{k,i} in distribution k, with

    Σ_i r_{k,i} = 1  for every k,        Σ_k r_{k,i} = m p_i  for every i                       (Proposition 1)

so that a client is drawn m p_i times in expectation, as with `multinomial`, and never more unevenly: the
variance Σ_k r_{k,i} (1 - r_{k,i}) is at most m p_i (1 - p_i), and less where a client is not in all distributions
alike. The more alike the clients of one distribution are, the better one draw speaks for it.

Numbers are whole: with M units in all, of which client i has u_i (its samples), there are m urns of M units,
and client i puts m u_i units into them. r_{k,i} is its part of urn k, so both sums hold exactly. Urns lie one
after the other on a line of m·M units, and a sampling is the order of the clients on that line.

Where the same client lies in two urns it may be drawn twice; it then trains once and counts twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safari.errors import ConfigError, one_of
from safari.sampling.sampling import Draw, Sampling, SamplingRound, State
from safari.sampling.ward import groups_within, ward

Distance = Literal["arccos", "l2"]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Four bytes a number of every client: 8 GB. A matrix of all pairs: 200 MB.
MOST_REMEMBERED, MOST_CLIENTS = 2_000_000_000, 5_000
# What weights that are no whole numbers are rounded to.
_UNITS = 2**40
# Distances beyond this would overflow when they are squared and summed.
_FARTHEST = 1e100


@dataclass(frozen=True)
class Line:
    """Clients on a line of `draws` urns of `urn` units each: a client may have several pieces."""

    draws: int
    urn: int
    clients: Ints
    units: Ints

    def draw(self, rng: np.random.Generator) -> Ints:
        """One client from each urn, by the units that it has there."""
        places = self.urn * np.arange(self.draws) + rng.integers(0, self.urn, self.draws)
        return self.clients[np.searchsorted(np.cumsum(self.units), places, side="right")]

    def distributions(self, clients: int) -> Floats:
        """The probabilities r, `float64[draws, clients]`.

        >>> Line(2, 4, np.array([1, 0, 2]), np.array([5, 2, 1])).distributions(3)
        array([[0.  , 1.  , 0.  ],
               [0.5 , 0.25, 0.25]])
        """
        found = np.zeros((self.draws, clients))
        ends = np.cumsum(self.units)
        for client, end, units in zip(self.clients, ends, self.units, strict=True):
            for urn in range((end - units) // self.urn, -(-end // self.urn)):
                first, last = max(end - units, urn * self.urn), min(end, (urn + 1) * self.urn)
                found[urn, client] += (last - first) / self.urn
        return found


def clustered_size() -> Sampling:
    """Clustered sampling by sample size (Fraboni et al. 2021, Algorithm 1): one draw for each size class.

    Urns are filled from the largest client down; the distributions are the same in every round. Clients that count for
    the same are in a fixed order that has nothing to do with their ids.
    """

    def apply(state: State, round: SamplingRound) -> tuple[Draw, State]:
        return Draw.of(by_size(whole_units(round.weights), round.cohort).draw(round.rng)), state

    return Sampling(apply)


def clustered_similarity(*, distance: Distance = "arccos") -> Sampling:
    """Clustered sampling by similarity of updates (Fraboni et al. 2021, Algorithm 2): one draw for each cluster.

    `distance` between the last updates G_i = x_i - x of two clients: arccos, their angle; l2, ‖G_i - G_j‖. Ward's
    tree is cut where a cluster would exceed an urn. The m largest clusters begin an urn each; the clients of all
    others fill up what is left, the larger clusters first. A client that fills urns alone has these for itself, and
    the rest of it is clustered.

    What the server knows of a client is the last update that arrived from it, however old: where an upload is lost
    the one before stays. A client that was never heard has G_i = 0, as in the paper; such clients are at distance
    0 from each other, and at a right angle to all others. (The authors' code hands the rows of the matrix of angles
    to Ward as points; here they are the distances.)
    """
    if distance not in get_args(Distance):
        raise ConfigError(one_of("distance", distance, get_args(Distance)))

    def init(clients: int, parameters: int, device: torch.device) -> State:
        if clients > MOST_CLIENTS or clients * parameters > MOST_REMEMBERED:
            raise ConfigError(
                f"clustered-similarity remembers every client's update: clients must be at most {MOST_CLIENTS} and "
                f"clients × parameters at most {MOST_REMEMBERED}, got {clients} × {parameters}"
            )
        # Products of all pairs are kept, so that a round costs those of its arrivals alone.
        return {
            "updates": torch.zeros(clients, parameters, device=device),
            "products": torch.zeros(clients, clients, dtype=torch.float64),
        }

    def apply(state: State, round: SamplingRound) -> tuple[Draw, State]:
        apart = distances(state["products"].numpy(), distance)
        return Draw.of(by_similarity(whole_units(round.weights), round.cohort, apart).draw(round.rng)), state

    def learn(state: State, ids: Tensor, updates: Tensor) -> State:
        known = state["updates"].index_copy(0, ids.to(state["updates"].device), updates)
        fresh = (updates @ known.T).double().cpu()
        products, rows = state["products"].clone(), ids.cpu()
        products[rows], products[:, rows] = fresh, fresh.T
        return {"updates": known, "products": products}

    return Sampling(apply, init, learn)


def whole_units(weights: Floats) -> Ints:
    """Weights as whole numbers: as they are where they are whole, otherwise to about twelve digits.

    >>> whole_units(np.array([3.0, 0.0, 20.0])).tolist()
    [3, 0, 20]
    """
    if bool((weights == np.round(weights)).all()) and weights.sum() < _UNITS:
        return weights.astype(np.int64)
    shares = np.round(weights / weights.sum() * _UNITS).astype(np.int64)
    return np.where(weights > 0, np.maximum(shares, 1), 0)


def by_size(units: Ints, draws: int) -> Line:
    """Algorithm 1: clients on the line from the largest down.

    >>> by_size(np.array([1, 2, 1]), 2).distributions(3)
    array([[0. , 1. , 0. ],
           [0.5, 0. , 0.5]])
    """
    order = np.lexsort((_scattered(np.arange(len(units))), -units))
    return Line(draws, int(units.sum()), order, draws * units[order])


def by_similarity(units: Ints, draws: int, apart: Floats) -> Line:
    """Algorithm 2: urns begun by the largest clusters of Ward's tree, and filled with the clients of the others."""
    urn = int(units.sum())
    alone, rest = np.divmod(draws * units, urn)
    whole = np.flatnonzero(alone)
    pieces = [(int(client), int(alone[client]) * urn) for client in whole]
    there = np.flatnonzero(rest)
    there = there[np.argsort(_scattered(there))]
    groups = groups_within(ward(apart[np.ix_(there, there)]), rest[there], urn)
    sizes = [int(rest[there[group]].sum()) for group in groups]
    order = sorted(range(len(groups)), key=lambda g: (-sizes[g], groups[g][0]))
    urns = draws - int(alone.sum())
    waiting = deque((int(c), int(rest[c])) for g in order[urns:] for c in there[groups[g]])
    for g in order[:urns]:
        pieces += [(int(c), int(rest[c])) for c in there[groups[g]]]
        pieces += _taken(waiting, urn - sizes[g])
    return Line(draws, urn, *np.array(pieces, np.int64).reshape(-1, 2).T)


def _scattered(ids: Ints) -> Ints:
    """A key by which ids are in a fixed order that says nothing about them (Knuth's multiplicative hash).

    Ties are broken by it: clients with neighbouring ids often have similar data, in simulations by construction, and a
    sampling that put neighbours together would seem to know that.
    """
    return ids * 2654435761 % 2**32


def _taken(waiting: deque[tuple[int, int]], room: int) -> Sequence[tuple[int, int]]:
    """`room` units from the front of the queue; a client that does not fit whole stays in front with the rest."""
    found = []
    while room:
        client, units = waiting.popleft()
        found.append((client, min(units, room)))
        if units > room:
            waiting.appendleft((client, units - room))
        room -= found[-1][1]
    return found


def distances(products: Floats, distance: Distance) -> Floats:
    """The distances of all pairs, from the products of their updates.

    >>> distances(np.array([[4.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), "l2").round(3)
    array([[0.   , 2.236, 2.   ],
           [2.236, 0.   , 1.   ],
           [2.   , 1.   , 0.   ]])
    """
    # Squares of huge numbers are infinite, and what is not a number counts as orthogonal to everything.
    products = np.nan_to_num(products, nan=0.0, posinf=_FARTHEST, neginf=-_FARTHEST)
    squares = np.maximum(products.diagonal(), 0.0)
    if distance == "l2":
        apart = np.sqrt(np.maximum(squares[:, None] + squares - 2 * products, 0.0))
    else:
        lengths = np.sqrt(squares)
        scale = lengths[:, None] * lengths
        cosines = np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)
        silent = lengths == 0
        apart = np.where(silent[:, None] & silent, 0.0, np.arccos(np.clip(cosines, -1.0, 1.0)))
    apart = np.minimum((apart + apart.T) / 2, math.sqrt(_FARTHEST))
    np.fill_diagonal(apart, 0.0)
    return apart
