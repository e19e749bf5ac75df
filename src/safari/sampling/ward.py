"""Hierarchical clustering by Ward's method, and the clusters of its tree that do not exceed a size.

Ward, "Hierarchical Grouping to Optimize an Objective Function", JASA 1963: of all pairs of clusters, the one is
merged whose merging adds least to the sum of squares within clusters. In terms of distances (Lance and Williams
1967), with n_i members in cluster i:

    d(i∪j, k)² = [ (n_i + n_k) d(i,k)² + (n_j + n_k) d(j,k)² - n_k d(i,j)² ] / (n_i + n_j + n_k)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# A merge as the two nodes of the tree that it joins: leaves are 0 .. n - 1, the k-th merge is node n + k.
Merge = tuple[int, int]


def ward(distances: NDArray[np.float64]) -> list[Merge]:
    """Ward's tree over symmetric, finite distances, as n - 1 merges; a node is merged after it was made.

    By chains of nearest neighbours, in O(n²): a chain ends where two clusters are each other's nearest, and Ward
    merges these sooner or later. Of neighbours that are equally near, the earlier in the chain, then the lower id.

    >>> ward(np.array([[0.0, 9.0, 1.0], [9.0, 0.0, 8.0], [1.0, 8.0, 0.0]]))
    [(0, 2), (1, 3)]
    """
    count = len(distances)
    squares = np.square(distances)
    np.fill_diagonal(squares, np.inf)
    sizes, nodes, alive = np.ones(count), list(range(count)), np.ones(count, np.bool_)
    merges: list[Merge] = []
    chain: list[int] = []
    while len(merges) < count - 1:
        if not chain:
            chain.append(int(np.argmax(alive)))
        last = chain[-1]
        near = int(np.argmin(squares[last]))
        if len(chain) < 2 or squares[last, near] < squares[last, chain[-2]]:
            chain.append(near)
            continue
        i, j = chain.pop(), chain.pop()
        merges.append((min(nodes[i], nodes[j]), max(nodes[i], nodes[j])))
        together = sizes[i] + sizes[j]
        new = ((sizes[i] + sizes) * squares[i] + (sizes[j] + sizes) * squares[j] - sizes * squares[i, j]) / (
            together + sizes
        )
        # The diagonal and what is merged already are infinitely far.
        new = np.where(alive, np.maximum(new, 0.0), np.inf)
        alive[j], sizes[i], nodes[i] = False, together, count + len(merges) - 1
        new[[i, j]] = np.inf
        squares[i], squares[:, i] = new, new
        squares[j], squares[:, j] = np.inf, np.inf
    return merges


def groups_within(merges: list[Merge], sizes: NDArray[np.int64], most: int) -> list[list[int]]:
    """The largest clusters of a tree whose members' sizes sum to at most `most`; each ascending.

    >>> groups_within([(0, 2), (1, 3)], np.array([2, 2, 2]), 4)
    [[0, 2], [1]]
    """
    groups: dict[int, list[int]] = {leaf: [leaf] for leaf in range(len(sizes))}
    for k, (a, b) in enumerate(merges):
        # A part that is too large is no longer there, and nothing that holds it can be.
        if a in groups and b in groups and sizes[groups[a] + groups[b]].sum() <= most:
            groups[len(sizes) + k] = sorted(groups.pop(a) + groups.pop(b))
    return sorted(groups.values())
