from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safari.data import (
    PARTITIONS,
    dirichlet,
    divide,
    from_tensors,
    groups,
    iid,
    label_counts,
    natural,
    shards,
)
from safari.errors import ConfigError, DataError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


TWENTY = np.arange(20) % 10
# Those of our own that divide any labels, without owners.
BY_LABEL = ("groups", "iid", "shards", "dirichlet")


def test_the_paper_s_ten_clients_in_two_groups():
    labels = np.repeat(np.arange(10), 100)
    counts = label_counts(labels, groups(labels, 10, rng()), 10)
    assert (counts[:5, 5:] == 0).all()
    assert (counts[5:, :5] == 0).all()
    assert counts.sum(1).tolist() == [100] * 10
    assert counts.sum(0).tolist() == [100] * 10
    # IID inside a group: 20 of each label expected, hypergeometric with a standard deviation of 3.6.
    assert 5 < counts[:5, :5].min() <= counts[:5, :5].max() < 35


@pytest.mark.parametrize(
    ("clients", "n_groups", "labels_of_clients"),
    [
        (1, 1, [range(10)]),
        (2, 2, [range(5), range(5, 10)]),
        (3, 3, [range(4), range(4, 7), range(7, 10)]),
        (4, 3, [range(4), range(4), range(4, 7), range(7, 10)]),
        (10, 10, [[label] for label in range(10)]),
    ],
)
def test_groups_give_the_first_blocks_the_rest(clients, n_groups, labels_of_clients):
    labels = np.repeat(np.arange(10), 60)
    parts = groups(labels, clients, rng(), groups=n_groups)
    assert [sorted(set(labels[part])) for part in parts] == [list(block) for block in labels_of_clients]


def test_groups_count_the_labels_that_occur():
    labels = np.array([3, 3, 7, 7, 90, 90])
    parts = groups(labels, 3, rng(), groups=3)
    assert [labels[part].tolist() for part in parts] == [[3, 3], [7, 7], [90, 90]]


def test_shards_of_one_label_each():
    labels = np.array([0, 1, 2, 3] * 4)
    counts = label_counts(labels, shards(labels, 4, rng(), shards_per_client=1), 4)
    assert sorted(counts.tolist(), reverse=True) == (4 * np.eye(4, dtype=int)).tolist()


def test_shards_bound_the_labels_of_a_client():
    labels = rng().permutation(np.repeat(np.arange(10), 100))
    counts = label_counts(labels, shards(labels, 10, rng(1), shards_per_client=2), 10)
    # 20 shards of 50 samples, each within one label.
    assert ((counts > 0).sum(1) <= 2).all()
    assert counts.sum(1).tolist() == [100] * 10


def test_shards_draw_which_samples_make_a_shard():
    labels = np.zeros(100, np.int64)
    first = shards(labels, 2, rng(0), shards_per_client=1)[0]
    assert first.tolist() not in (list(range(50)), list(range(50, 100)))


def test_dirichlet_shares_have_the_distribution_s_mean_and_spread():
    labels, alpha, clients = np.zeros(20_000, np.int64), 0.5, 4
    draws = [dirichlet(labels, clients, rng(seed), alpha=alpha) for seed in range(400)]
    shares = np.array([[len(part) / 20_000 for part in parts] for parts in draws])
    # For a symmetric Dirichlet: mean 1/k, variance (k-1) / (k^2 (k alpha + 1)).
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert shares.mean(0) == pytest.approx(np.full(clients, 1 / clients), abs=4 * math.sqrt(variance / 400))
    assert shares.var() == pytest.approx(variance, rel=0.15)


def test_dirichlet_small_alpha_is_skewed_and_large_alpha_is_even():
    labels = np.repeat(np.arange(10), 200)
    skewed = label_counts(labels, dirichlet(labels, 10, rng(), alpha=1e-9), 10)
    even = label_counts(labels, dirichlet(labels, 10, rng(), alpha=1e9), 10)
    assert (skewed.max(0) >= 190).all()
    assert np.abs(even - 20).max() <= 1


def test_dirichlet_by_clients_divides_a_label_in_proportion_to_what_each_client_drew():
    """Each client draws Dirichlet(alpha) over the labels: its shares of a label are those, over their sum."""
    labels, clients, alpha = np.repeat(np.arange(4), 1000), 5, 0.5
    counts = label_counts(labels, dirichlet(labels, clients, rng(3), alpha=alpha, by="clients"), 4)
    drawn = rng(3).dirichlet(np.full(4, alpha), clients)
    assert np.abs(counts - 1000 * drawn / drawn.sum(0)).max() <= 1
    # By labels the sizes of clients differ far more: there each label has a few owners.
    skewed, even = (
        np.std([len(p) for s in range(40) for p in dirichlet(labels, clients, rng(s), alpha=0.1, by=by)])
        for by in ("labels", "clients")
    )
    assert even < 0.7 * skewed


def test_dirichlet_balanced_gives_no_more_to_a_client_that_has_its_equal_share():
    labels = np.repeat(np.arange(10), 100)
    for seed in range(20):
        parts = dirichlet(labels, 10, rng(seed), alpha=0.5, balanced=True)
        counts = label_counts(labels, parts, 10)
        before = np.cumsum(counts, axis=1) - counts
        assert not counts[before >= 100].any()
        check(labels, parts, 10)
    plain = max(len(part) for part in dirichlet(labels, 10, rng(0), alpha=0.1))
    assert max(len(part) for part in dirichlet(labels, 10, rng(0), alpha=0.1, balanced=True)) < plain


@pytest.mark.parametrize(
    "options", [{"by": "clients"}, {"balanced": True}, {"by": "clients", "balanced": True}]
)
def test_dirichlet_with_a_tiny_alpha_leaves_no_sample_without_an_owner(options):
    for seed in range(5):
        check(TWENTY, dirichlet(TWENTY, 7, rng(seed), alpha=1e-9, **options), 7)


def test_dirichlet_fills_up_from_the_largest():
    labels = np.zeros(10, np.int64)
    # With so small an alpha one client gets all, and gives the others their minimum.
    sizes = sorted(len(part) for part in dirichlet(labels, 4, rng(), alpha=1e-9, minimum=2))
    assert sizes == [2, 2, 2, 4]
    assert [len(part) for part in dirichlet(labels, 5, rng(), alpha=1e-9, minimum=2)] == [2] * 5
    assert [len(part) for part in dirichlet(labels, 10, rng(), alpha=1e-9)] == [1] * 10


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e18])
def test_dirichlet_at_the_ends_of_alpha(alpha):
    for clients in (1, 2, 20):
        check(TWENTY, dirichlet(TWENTY, clients, rng(), alpha=alpha), clients)


def check(labels, parts, clients):
    """What every partition must give: one sorted, non-empty part a client, disjoint, together everything."""
    assert len(parts) == clients
    assert all(part.dtype == np.int64 and len(part) >= 1 and (np.diff(part) > 0).all() for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))


@st.composite
def partition_cases(draw):
    clients = draw(st.integers(1, 12))
    classes = draw(st.integers(1, 6))
    # Enough of every class for a block of clients, whatever the number of groups.
    labels = np.repeat(np.arange(classes), draw(st.integers(clients, 3 * clients)))
    labels = np.random.default_rng(draw(st.integers(0, 5))).permutation(labels)
    most = len(labels) // clients
    options = {
        "groups": {"groups": draw(st.integers(1, min(classes, clients)))},
        "iid": {},
        "shards": {"shards_per_client": draw(st.integers(1, most))},
        "dirichlet": {
            "alpha": draw(st.floats(1e-3, 1e3)),
            "minimum": draw(st.integers(1, most)),
            "by": draw(st.sampled_from(["labels", "clients"])),
            "balanced": draw(st.booleans()),
        },
    }
    name = draw(st.sampled_from(sorted(BY_LABEL)))
    return name, labels, clients, options[name], draw(st.integers(0, 2**32 - 1))


@given(partition_cases())
@settings(max_examples=150)
def test_every_partition_holds_its_contract(case):
    name, labels, clients, options, seed = case
    before = labels.copy()
    parts = PARTITIONS[name](labels, clients, rng(seed), **options)
    check(labels, parts, clients)
    assert (labels == before).all()
    again = PARTITIONS[name](labels, clients, rng(seed), **options)
    assert all((one == other).all() for one, other in zip(parts, again, strict=True))
    sizes = [len(part) for part in parts]
    if name == "iid":
        assert max(sizes) - min(sizes) <= 1
    if name == "groups":
        by_group: dict[tuple[int, ...], list[int]] = {}
        for index, block in enumerate(np.array_split(np.arange(clients), options["groups"])):
            held = np.array_split(np.arange(labels.max() + 1), options["groups"])[index]
            by_group[tuple(held)] = [sizes[client] for client in block]
            assert all(set(labels[parts[client]]) <= set(held) for client in block)
        assert all(max(block) - min(block) <= 1 for block in by_group.values())
    if name == "shards":
        assert max(sizes) - min(sizes) <= options["shards_per_client"]
    if name == "dirichlet":
        assert min(sizes) >= options["minimum"]


@pytest.mark.parametrize("name", BY_LABEL)
def test_another_seed_gives_another_partition(name):
    labels = np.repeat(np.arange(10), 50)
    one, other = (PARTITIONS[name](labels, 10, rng(seed)) for seed in (0, 1))
    assert any(a.tolist() != b.tolist() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", BY_LABEL)
def test_a_hundred_thousand_clients(name):
    labels = np.random.default_rng(0).integers(0, 10, 300_000)
    parts = PARTITIONS[name](labels, 100_000, rng())
    assert len(parts) == 100_000
    assert min(map(len, parts)) >= 1
    assert (np.sort(np.concatenate(parts)) == np.arange(300_000)).all()


@pytest.mark.parametrize(
    ("name", "labels", "clients", "options", "message"),
    [
        ("iid", TWENTY, 0, {}, "clients must be an integer of at least 1, got 0"),
        ("iid", TWENTY, True, {}, "clients must be an integer of at least 1, got True"),
        ("iid", TWENTY, 2.0, {}, "clients must be an integer of at least 1, got 2.0"),
        ("iid", TWENTY, 21, {}, "clients must be at most the number of samples (20), got 21"),
        ("groups", TWENTY, 21, {}, "clients must be at most the number of samples (20), got 21"),
        ("groups", TWENTY, 10, {"groups": 0}, "groups must be an integer of at least 1, got 0"),
        ("groups", TWENTY, 20, {"groups": 11}, "groups must be at most the number of classes (10), got 11"),
        ("groups", TWENTY, 3, {"groups": 4}, "groups must be at most the number of clients (3), got 4"),
        (
            "groups",
            np.array([0, 0, 0, 0, 0, 1]),
            4,
            {"groups": 2},
            "groups must leave each group a sample for each of its clients; "
            "with 2, group 1 has 2 clients and 1 samples",
        ),
        (
            "shards",
            TWENTY,
            4,
            {"shards_per_client": 0},
            "shards_per_client must be an integer of at least 1, got 0",
        ),
        (
            "shards",
            TWENTY,
            4,
            {"shards_per_client": 6},
            "shards_per_client must be at most samples / clients (20 / 4 = 5), got 6",
        ),
        ("dirichlet", TWENTY, 4, {"alpha": 0}, "alpha must be above 0 and at most 1e+18, got 0"),
        ("dirichlet", TWENTY, 4, {"alpha": -0.5}, "alpha must be above 0 and at most 1e+18, got -0.5"),
        ("dirichlet", TWENTY, 4, {"alpha": math.nan}, "alpha must be above 0 and at most 1e+18, got nan"),
        ("dirichlet", TWENTY, 4, {"alpha": math.inf}, "alpha must be above 0 and at most 1e+18, got inf"),
        ("dirichlet", TWENTY, 4, {"alpha": "a"}, "alpha must be above 0 and at most 1e+18, got 'a'"),
        ("dirichlet", TWENTY, 4, {"minimum": 0}, "minimum must be an integer of at least 1, got 0"),
        (
            "dirichlet",
            TWENTY,
            3,
            {"minimum": 7},
            "minimum must be at most samples / clients (20 / 3 = 6), got 7",
        ),
    ],
)
def test_errors_name_the_option_the_limit_and_the_value(name, labels, clients, options, message):
    with pytest.raises(ConfigError) as error:
        PARTITIONS[name](labels, clients, rng(), **options)
    assert str(error.value) == message


def test_labels_that_are_none():
    with pytest.raises(DataError, match=r"labels must be a non-empty array, got shape \[0\]"):
        iid(np.zeros(0, np.int64), 1, rng())


@pytest.mark.parametrize("name", ["groups", "shards", "dirichlet"])
@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (np.zeros((20, 4), np.int64), r"a label for each token \(int64 of shape \[20, 4\]\)"),
        (np.zeros((20, 1), np.float32), r"numbers \(float32 of shape \[20, 1\]\)"),
    ],
)
def test_what_divides_by_class_says_that_there_is_none(name, labels, kind):
    message = f"it needs one class a sample, and these labels are {kind}; iid and natural need none"
    with pytest.raises(ConfigError, match=message):
        PARTITIONS[name](labels, 4, rng())
    check(labels, iid(labels, 4, rng()), 4)


def test_natural_clients_are_the_data_s_own():
    owners = np.array([30, 10, 20, 10, 30, 30, 10, 40])
    labels = np.zeros((8, 5), np.int64)
    everyone = natural(labels, 4, rng(), owners)
    assert [part.tolist() for part in everyone] == [[1, 3, 6], [2], [0, 4, 5], [7]]
    largest = natural(labels, 2, rng(), owners, pick="largest")
    assert [part.tolist() for part in largest] == [[1, 3, 6], [0, 4, 5]]
    some = {tuple(map(tuple, natural(labels, 2, rng(seed), owners))) for seed in range(40)}
    assert len(some) == 6
    busy = natural(labels, 2, rng(), owners, minimum=2)
    assert [part.tolist() for part in busy] == [[1, 3, 6], [0, 4, 5]]
    with pytest.raises(ConfigError, match=r"^clients must be at most the number of owners \(4\), got 5$"):
        natural(labels, 5, rng(), owners)
    with pytest.raises(
        ConfigError, match=r"at most the number of owners with at least 2 samples \(2\), got 3"
    ):
        natural(labels, 3, rng(), owners, minimum=2)
    with pytest.raises(ConfigError, match=r"natural needs data that say whose each sample is"):
        natural(labels, 2, rng())


def test_a_partition_gets_the_owners_where_it_asks_for_them():
    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    data = from_tensors("toy", (x, y), (x, y), owners=np.array([5, 5, 6, 6]))

    def mine(labels, clients, rng, *, owners=3):
        return [np.array([owners])]

    assert [part.tolist() for part in divide(natural, data, 2, rng(), {})] == [[0, 1], [2, 3]]
    assert [part.tolist() for part in divide(mine, data, 2, rng(), {})] == [[3]]
    assert [part.tolist() for part in divide(groups, data, 2, rng(), {"groups": 2})] == [[0, 2], [1, 3]]


def test_label_counts_by_hand():
    labels = np.array([0, 1, 1, 2, 2, 2])
    parts = [np.array([0, 3]), np.array([], np.int64), np.array([1, 2, 4])]
    assert label_counts(labels, parts, 4).tolist() == [[1, 0, 1, 0], [0, 0, 0, 0], [0, 2, 1, 0]]
    assert label_counts(labels, [], 4).shape == (0, 4)
    with pytest.raises(DataError, match=r"^labels must lie in 0\.\.1, got 0\.\.2$"):
        label_counts(labels, parts, 2)


def test_each_says_what_it_is_in_one_line():
    for function in PARTITIONS.values():
        first = (function.__doc__ or "").splitlines()[0]
        assert first.endswith(".")
        assert len(first) < 110
