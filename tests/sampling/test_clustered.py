"""Fraboni's two algorithms: the paper's properties, an oracle written from the paper, and what draws look like."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import pdist, squareform

from safari.errors import ConfigError
from safari.sampling import SamplingRound, clustered_similarity, clustered_size
from safari.sampling.clustered import by_similarity, by_size, distances, whole_units
from safari.sampling.ward import ward
from sampling.oracle import algorithm_1, algorithm_2, as_matrix

CPU = torch.device("cpu")


@st.composite
def crowds(draw: st.DrawFn) -> tuple[np.ndarray, int, np.ndarray]:
    """Sample counts (some 0: they cannot be asked), how many draws, and distances between all pairs."""
    counts = draw(st.lists(st.integers(0, 60), min_size=1, max_size=14).filter(any))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    points = rng.normal(size=(len(counts), 3)) * rng.choice([0.0, 1.0], (len(counts), 1), p=[0.3, 0.7])
    apart = np.linalg.norm(points[:, None] - points[None], axis=2)
    return np.array(counts), draw(st.integers(1, len(counts) + 3)), apart


@settings(max_examples=150, deadline=None)
@given(crowds())
def test_every_distribution_sums_to_1_and_every_client_has_m_times_its_weight(crowd) -> None:
    units, m, apart = crowd
    for line in (by_size(units, m), by_similarity(units, m, apart)):
        r = line.distributions(len(units))
        assert r.shape == (m, len(units))
        # In whole units both hold exactly.
        assert np.bincount(line.clients, line.units, len(units)).tolist() == (m * units).tolist()
        np.testing.assert_allclose(r.sum(1), 1, rtol=1e-12)
        np.testing.assert_allclose(r.sum(0), m * units / units.sum(), rtol=1e-12)
        # Drawn less unevenly than by m independent draws (the paper's section 3.2).
        p = units / units.sum()
        assert ((r * (1 - r)).sum(0) <= m * p * (1 - p) + 1e-12).all()


@settings(max_examples=100, deadline=None)
@given(crowds())
def test_distributions_are_those_of_the_paper_written_again(crowd) -> None:
    units, m, _ = crowd
    rng = np.random.default_rng(len(units))
    # Without ties: where two merges are equally good, either tree is Ward's.
    apart = squareform(pdist(rng.normal(size=(len(units), 4)))) if len(units) > 1 else np.zeros((1, 1))
    samples = units.tolist()
    first = as_matrix(algorithm_1(samples, m), len(units))
    np.testing.assert_allclose(by_size(units, m).distributions(len(units)), first, atol=1e-12)
    second = as_matrix(algorithm_2(samples, m, apart), len(units))
    np.testing.assert_allclose(by_similarity(units, m, apart).distributions(len(units)), second, atol=1e-12)


@pytest.mark.parametrize("count", [2, 3, 7, 60])
def test_wards_tree_is_scipys(count: int) -> None:
    apart = squareform(pdist(np.random.default_rng(count).normal(size=(count, 5))))

    def clusters(merges) -> set[frozenset[int]]:
        found = [frozenset([i]) for i in range(count)]
        for a, b in merges:
            found.append(found[int(a)] | found[int(b)])
        return set(found)

    assert clusters(ward(apart)) == clusters(linkage(squareform(apart), "ward")[:, :2])


@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_tree_of_equal_distances_has_an_end(count: int) -> None:
    for apart in (np.zeros((count, count)), 1 - np.eye(count)):
        merges = ward(apart)
        assert sorted(node for merge in merges for node in merge) == list(range(2 * count - 2))


def test_numbers_that_can_be_checked_by_hand() -> None:
    # 10 samples, 2 urns of 10 units; the clients put in 2, 8, 4 and 6. By size: 1, 3, 2, 0.
    r = by_size(np.array([1, 4, 2, 3]), 2).distributions(4)
    np.testing.assert_allclose(r, [[0, 0.8, 0, 0.2], [0.2, 0, 0.4, 0.4]])
    # 0 and 1 are alike, 2 and 3 are: 10 units each.
    apart = np.array([[0, 1, 9, 9], [1, 0, 9, 9], [9, 9, 0, 1], [9, 9, 1, 0.0]])
    r = by_similarity(np.array([1, 4, 2, 3]), 2, apart).distributions(4)
    np.testing.assert_allclose(r, [[0.2, 0.8, 0, 0], [0, 0, 0.4, 0.6]])
    # A client with more than an urn: 0 has 7 of 10 samples, 14 units of two urns.
    r = by_similarity(np.array([7, 2, 1]), 2, np.ones((3, 3))).distributions(3)
    np.testing.assert_allclose(r, [[1, 0, 0], [0.4, 0.4, 0.2]])


def view(weights, m: int, seed: int = 0) -> SamplingRound:
    return SamplingRound(0, m, np.asarray(weights, np.float64), np.random.default_rng(seed))


def test_clients_are_drawn_as_often_as_their_weight_says() -> None:
    weights, m, rounds = np.array([5, 1, 1, 9, 4, 0, 20, 2]), 4, 800
    p = weights / weights.sum()
    updates = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    for sampling in (clustered_size(), clustered_similarity()):
        state, times = sampling.init(8, 3, CPU), np.zeros(8)
        state = sampling.learn(state, torch.arange(8), updates) if sampling.learn else state
        for seed in range(rounds):
            draw, _ = sampling.apply(state, view(weights, m, seed))
            times[list(draw.clients)] += m * np.array(draw.shares)
        # Five standard errors of the most uneven sampling with these means.
        assert (abs(times / rounds - m * p) < 5 * np.sqrt(m * p * (1 - p) / rounds) + 1e-9).all()
        assert times[5] == 0


def test_one_of_each_group_once_the_server_has_heard_them() -> None:
    sampling, m = clustered_similarity(), 2
    state = sampling.init(10, 4, CPU)
    first, _ = sampling.apply(state, view(np.ones(10), m))
    assert len(first.clients) == 2
    noise = 0.01 * torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    groups = torch.tensor([0, 1] * 5)
    updates = torch.eye(4)[groups] + noise
    state = sampling.learn(state, torch.arange(10), updates)
    for seed in range(50):
        draw, _ = sampling.apply(state, view(np.ones(10), m, seed))
        assert sorted(groups[list(draw.clients)].tolist()) == [0, 1]
        assert draw.shares == (0.5, 0.5)


def test_the_last_update_stays_and_products_are_those_of_all_pairs() -> None:
    sampling = clustered_similarity(distance="l2")
    state = sampling.init(5, 3, CPU)
    rng = torch.Generator().manual_seed(1)
    for ids in ([0, 3], [1, 3, 4], [0]):
        updates = torch.randn(len(ids), 3, generator=rng)
        before = {name: tensor.clone() for name, tensor in state.items()}
        after = sampling.learn(state, torch.tensor(ids), updates)
        assert all(torch.equal(state[name], before[name]) for name in state), "the state was changed in place"
        state = after
    known = state["updates"]
    assert torch.equal(known[0], updates[0])
    assert not known[2].any(), "never heard"
    torch.testing.assert_close(state["products"], (known @ known.T).double(), rtol=1e-6, atol=1e-6)
    apart = distances(state["products"].numpy(), "l2")
    np.testing.assert_allclose(apart, squareform(pdist(known.numpy())), atol=1e-3)


def test_angles_of_those_that_were_never_heard() -> None:
    updates = np.array([[1.0, 0.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    apart = distances(updates @ updates.T, "arccos")
    right = np.pi / 2
    np.testing.assert_allclose(
        apart,
        [
            [0, np.pi / 4, right, right],
            [np.pi / 4, 0, right, right],
            [right, right, 0, 0],
            [right, right, 0, 0],
        ],
        atol=1e-7,
    )


def test_neighbours_that_nothing_tells_apart_are_not_put_together() -> None:
    """In a simulation the first half of the clients often is a group: as many of it are in every urn."""
    for line in (
        by_size(np.full(100, 15), 10),
        by_similarity(np.full(100, 15), 10, np.zeros((100, 100))),
        by_similarity(np.full(100, 15), 10, 1 - np.eye(100)),
    ):
        half = line.distributions(100)[:, :50].sum(1)
        assert 0.2 <= half.min() <= half.max() <= 0.8


def test_weights_that_are_no_whole_numbers() -> None:
    units = whole_units(np.array([0.25, 0.5, 0.0, 1e-30]))
    assert units[2] == 0
    assert units[3] == 1
    assert abs(units[1] - 2 * units[0]) <= 1
    assert abs(units.sum() / 2**40 - 1) < 1e-9


def test_what_is_too_large_is_refused_by_its_numbers() -> None:
    with pytest.raises(ConfigError, match=r"at most 5000 and clients × parameters at most .*, got 6000 × 1$"):
        clustered_similarity().init(6000, 1, CPU)
    with pytest.raises(ConfigError, match="distance must be one of arccos, l2"):
        clustered_similarity(distance="cosine")  # type: ignore[arg-type]
