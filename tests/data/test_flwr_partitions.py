"""The division is Flower's, sample by sample: their `FederatedDataset` against our names."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from safari.data import PARTITIONS, Data, divide, from_tensors, hf
from safari.errors import ConfigError

datasets = pytest.importorskip("datasets")
flwr_datasets = pytest.importorskip("flwr_datasets")
partitioner = pytest.importorskip("flwr_datasets.partitioner")

N, CLIENTS = 300, 6
RNG = np.random.default_rng(4)
X = RNG.standard_normal(N)
Y = RNG.integers(0, 5, N)
WHO = RNG.integers(0, 9, N) * 11


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    made = datasets.Dataset.from_dict({"x": X, "label": Y, "who": [f"w{w:03}" for w in WHO]})
    made.to_parquet(folder / "train.parquet")
    made.select(range(20)).to_parquet(folder / "test.parquet")
    return folder


@pytest.fixture(scope="module")
def data(folder: Path) -> Data:
    return hf(source=str(folder), inputs=["x"], owner="who", normalise=False)


CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("flwr-iid", {}, "IidPartitioner", {"num_partitions": CLIENTS}),
    (
        "flwr-dirichlet",
        {"alpha": 0.3, "seed": 7},
        "DirichletPartitioner",
        {"num_partitions": CLIENTS, "partition_by": "label", "alpha": 0.3, "seed": 7},
    ),
    (
        "flwr-dirichlet",
        {"alpha": 5, "self_balancing": True, "min_partition_size": 3},
        "DirichletPartitioner",
        {
            "num_partitions": CLIENTS, "partition_by": "label", "alpha": 5.0, "self_balancing": True,
            "min_partition_size": 3,
        },
    ),
    (
        "flwr-pathological",
        {"num_classes_per_partition": 3, "class_assignment_mode": "first-deterministic"},
        "PathologicalPartitioner",
        {
            "num_partitions": CLIENTS, "partition_by": "label", "num_classes_per_partition": 3,
            "class_assignment_mode": "first-deterministic",
        },
    ),
    (
        "flwr-shard",
        {"num_shards_per_partition": 3, "seed": 1},
        "ShardPartitioner",
        {"num_partitions": CLIENTS, "partition_by": "label", "num_shards_per_partition": 3, "seed": 1},
    ),
    ("flwr-size", {"growth": "square"}, "SquarePartitioner", {"num_partitions": CLIENTS}),
    ("flwr-natural", {}, "NaturalIdPartitioner", {"partition_by": "who"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "theirs", "their_options"), CASES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_same_division_as_flower_s(
    folder: Path,
    data: Data,
    name: str,
    options: dict[str, Any],
    theirs: str,
    their_options: dict[str, Any],
    shuffle: bool,
) -> None:
    made = getattr(partitioner, theirs)(**their_options)
    federated = flwr_datasets.FederatedDataset(
        dataset="parquet",
        data_files={"train": str(folder / "train.parquet")},
        partitioners={"train": made},
        shuffle=shuffle,
        seed=9,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = [np.array(federated.partitioners["train"].load_partition(i)["x"]) for i in range(CLIENTS)]
    parts = divide(PARTITIONS[name], data, CLIENTS, rng(), {**options, "shuffle": shuffle, "shuffle_seed": 9})
    found = [data.train_x[torch.from_numpy(part)].flatten().numpy() for part in parts]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other.astype(np.float32))


def test_numbers_are_divided_by_their_size() -> None:
    x = np.zeros((N, 1))
    data = from_tensors("toy", (x, X), (x, X))
    parts = divide(PARTITIONS["flwr-continuous"], data, 3, rng(), {"strictness": 1.0})
    means = [float(X[part].mean()) for part in parts]
    assert means == sorted(means)
    with pytest.raises(ConfigError, match=r"it needs one label a sample, got float32 of shape \[300, 1\]"):
        divide(PARTITIONS["flwr-dirichlet"], from_tensors("toy", (x, X), (x, X)), 3, rng(), {})


def test_groups_of_owners(data: Data) -> None:
    parts = divide(PARTITIONS["flwr-natural"], data, 3, rng(), {"group_size": 3})
    assert data.owners is not None
    assert [len(set(data.owners[torch.from_numpy(part)].tolist())) for part in parts] == [3, 3, 3]


@pytest.mark.parametrize(
    ("name", "clients", "options", "message"),
    [
        ("flwr-natural", 10, {}, "clients must be at most the 9 partitions that there are, got 10"),
        ("flwr-pathological", 4, {"num_classes_per_partition": 9}, "PathologicalPartitioner: The specified"),
        (
            "flwr-dirichlet",
            4,
            {"alpha": -1.0},
            "DirichletPartitioner: Alpha values should be strictly greater",
        ),
        ("flwr-dirichlet", 301, {}, "clients must be at most 300, got 301"),
        ("flwr-iid", 301, {}, "clients must be at most 300, got 301"),
        (
            "flwr-shard",
            6,
            {"num_shards_per_partition": 51},
            "num_shards_per_partition must be at most 50, got 51",
        ),
        ("flwr-shard", 301, {"num_shards_per_partition": 51}, "clients must be at most 300, got 301"),
        ("flwr-shard", 6, {"seed": -1}, "seed must be at least 0, got -1"),
        ("flwr-iid", 6, {"shuffle_seed": -1}, "shuffle_seed must be at least 0, got -1"),
        ("flwr-natural", 6, {"group_size": 0}, "group_size must be at least 1, got 0"),
    ],
)
def test_their_errors_are_raised_as_ours(
    data: Data, name: str, clients: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        divide(PARTITIONS[name], data, clients, rng(), options)
    assert str(error.value).startswith(message)


def test_their_progress_bars_and_warnings_stay_away(data: Data, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        divide(PARTITIONS["flwr-natural"], data, 4, rng(), {})
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
