"""Clustered sampling written again from the paper: fractions, urns as lists, and SciPy's tree."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

Urn = dict[int, Fraction]


def place(client: int) -> int:
    """Where a client stands among others like it: by Knuth's multiplicative hash."""
    return (client * 2654435761) % 2**32


def _pour(urns: list[Urn], first: int, client: int, amount: Fraction) -> int:
    """Put a client's probability into the urns from `first` on; the first that is not full afterwards."""
    while amount:
        room = 1 - sum(urns[first].values(), Fraction(0))
        if not room:
            first += 1
            continue
        part = min(room, amount)
        urns[first][client] = urns[first].get(client, Fraction(0)) + part
        amount -= part
    return first


def algorithm_1(samples: list[int], m: int) -> list[Urn]:
    urns: list[Urn] = [{} for _ in range(m)]
    k = 0
    for client in sorted(range(len(samples)), key=lambda i: (-samples[i], place(i))):
        k = _pour(urns, k, client, Fraction(m * samples[client], sum(samples)))
    return urns


def algorithm_2(samples: list[int], m: int, distances: np.ndarray) -> list[Urn]:
    """Urns of clients that fill some alone come first, then those of the clusters."""
    total = sum(samples)
    mine = [Fraction(m * n, total) for n in samples]
    alone: list[Urn] = [{i: Fraction(1)} for i, q in enumerate(mine) for _ in range(int(q))]
    left = {i: q - int(q) for i, q in enumerate(mine) if q - int(q)}
    ids = sorted(left)
    trees: list[tuple[int, ...]] = [(i,) for i in ids]
    fits = set(trees)
    if len(ids) > 1:
        for a, b, *_ in linkage(squareform(distances[np.ix_(ids, ids)], checks=False), "ward"):
            trees.append(trees[int(a)] + trees[int(b)])
            if sum(left[i] for i in trees[-1]) <= 1:
                fits.add(trees[-1])
    largest = [t for t in fits if not any(set(t) < set(other) for other in fits)]
    largest.sort(key=lambda t: (-sum(left[i] for i in t), min(map(place, t))))
    urns: list[Urn] = [{i: left[i] for i in sorted(t)} for t in largest[: m - len(alone)]]
    k = 0
    for tree in largest[m - len(alone) :]:
        for i in sorted(tree, key=place):
            k = _pour(urns, k, i, left[i])
    return alone + urns


def as_matrix(urns: list[Urn], clients: int) -> np.ndarray:
    found = np.zeros((len(urns), clients))
    for k, urn in enumerate(urns):
        for client, share in urn.items():
            found[k, client] = float(share)
    return found
