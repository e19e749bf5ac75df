"""The partitioners of flwr-datasets: the same division, sample by sample, because their code is run.

Flower's `FederatedDataset` shuffles a split and then hands it to a partitioner. Here a table of the labels
(and the samples' owners) goes the same way, together with the sample's number.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from safari.bounds import at_least, at_most
from safari.data.partitions import Labels, Parts
from safari.errors import ConfigError, MissingExtraError

_LABEL, _OWNER, _INDEX = "label", "owner", "index"


def flwr_iid(
    labels: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    shuffle: bool = True,
    shuffle_seed: int = 42,
) -> Parts:
    """Flower's IidPartitioner (flwr-datasets): contiguous parts of the shuffled data.

    `shuffle` and `shuffle_seed` are `shuffle` and `seed` of Flower's `FederatedDataset`, here and below.
    """
    return _divide(
        "IidPartitioner", {"num_partitions": clients}, labels, None, clients, shuffle, shuffle_seed
    )


def flwr_dirichlet(
    labels: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: float | Sequence[float] = 0.5,
    min_partition_size: int = 10,
    self_balancing: bool = False,
    seed: int = 42,
    shuffle: bool = True,
    shuffle_seed: int = 42,
) -> Parts:
    """Flower's DirichletPartitioner (flwr-datasets): each label in Dirichlet(alpha) shares.

    Drawn again until every client has `min_partition_size` samples. `seed` is the partitioner's, here and
    below: like Flower's it does not follow from the run's, so that all seeds of a run have the same division.
    """
    options = {
        "num_partitions": clients,
        "partition_by": _LABEL,
        "alpha": list(alpha) if isinstance(alpha, Sequence) else float(alpha),
        "min_partition_size": min_partition_size,
        "self_balancing": self_balancing,
        "seed": seed,
    }
    return _divide("DirichletPartitioner", options, labels, None, clients, shuffle, shuffle_seed)


def flwr_pathological(
    labels: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    num_classes_per_partition: int = 2,
    class_assignment_mode: Literal["random", "deterministic", "first-deterministic"] = "random",
    seed: int = 42,
    shuffle: bool = True,
    shuffle_seed: int = 42,
) -> Parts:
    """Flower's PathologicalPartitioner (flwr-datasets): a fixed number of classes for each client."""
    options = {
        "num_partitions": clients,
        "partition_by": _LABEL,
        "num_classes_per_partition": num_classes_per_partition,
        "class_assignment_mode": class_assignment_mode,
        "seed": seed,
    }
    return _divide("PathologicalPartitioner", options, labels, None, clients, shuffle, shuffle_seed)


def flwr_shard(
    labels: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    num_shards_per_partition: int = 2,
    seed: int = 42,
    shuffle: bool = True,
    shuffle_seed: int = 42,
) -> Parts:
    """Flower's ShardPartitioner (flwr-datasets): sorted by label, cut into shards, some for each client."""
    if 0 < clients <= len(labels):
        # Their code divides by the size of a shard, which would be 0.
        at_most("num_shards_per_partition", num_shards_per_partition, len(labels) // clients)
    options = {
        "num_partitions": clients,
        "partition_by": _LABEL,
        "num_shards_per_partition": num_shards_per_partition,
        "seed": seed,
    }
    return _divide("ShardPartitioner", options, labels, None, clients, shuffle, shuffle_seed)


def flwr_size(
    labels: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    growth: Literal["linear", "square", "exponential"] = "linear",
    shuffle: bool = True,
    shuffle_seed: int = 42,
) -> Parts:
    """Flower's Linear-, Square- or ExponentialPartitioner (flwr-datasets): later clients hold more."""
    name = f"{growth.capitalize()}Partitioner"
    return _divide(name, {"num_partitions": clients}, labels, None, clients, shuffle, shuffle_seed)


def flwr_continuous(
    labels: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    strictness: float = 0.5,
    seed: int = 42,
    shuffle: bool = True,
    shuffle_seed: int = 42,
) -> Parts:
    """Flower's ContinuousPartitioner (flwr-datasets): by the size of a label that is one number."""
    options = {"num_partitions": clients, "partition_by": _LABEL, "strictness": strictness, "seed": seed}
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    return _divide("ContinuousPartitioner", options, labels, None, clients, shuffle, shuffle_seed)


def flwr_natural(
    labels: Labels,
    clients: int,
    rng: np.random.Generator,
    owners: Labels | None = None,
    *,
    group_size: int = 1,
    shuffle: bool = True,
    shuffle_seed: int = 42,
) -> Parts:
    """Flower's NaturalIdPartitioner, or the grouped one (flwr-datasets): clients by a column of the data.

    With fewer clients than partitions, the first ones are taken. `group_size`: owners for each client.
    """
    if owners is None:
        raise ConfigError(
            "flwr-natural needs data that say whose each sample is: name the column (data.owner)"
        )
    options: dict[str, Any] = {"partition_by": _OWNER}
    name = "NaturalIdPartitioner"
    if group_size != 1:
        name = "GroupedNaturalIdPartitioner"
        options["group_size"] = at_least("group_size", group_size, 1)
    return _divide(name, options, labels, owners, clients, shuffle, shuffle_seed)


def _divide(
    name: str,
    options: dict[str, Any],
    labels: npt.NDArray[Any],
    owners: Labels | None,
    clients: int,
    shuffle: bool,
    shuffle_seed: int,
) -> Parts:
    try:
        partitioners = importlib.import_module("flwr_datasets.partitioner")
        tables = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtraError("flwr-datasets", "hf", "the partitions flwr-...") from error
    # What their messages do not name, or say in the middle of a traceback.
    at_most("clients", clients, len(labels))
    at_least("shuffle_seed", shuffle_seed, 0)
    at_least("seed", options.get("seed", 0), 0)
    columns: dict[str, Any] = {_INDEX: np.arange(len(labels))}
    if options.get("partition_by") == _LABEL:
        if labels.ndim != 1:
            raise ConfigError(
                f"it needs one label a sample, got {labels.dtype} of shape {[*labels.shape]}; "
                "flwr-iid, flwr-size and flwr-natural need none"
            )
        columns[_LABEL] = labels
    if owners is not None:
        columns[_OWNER] = owners
    table = tables.Dataset.from_dict(columns)
    table = table.shuffle(seed=shuffle_seed) if shuffle else table
    try:
        # Their code shows a progress bar, and warns of each draw that it repeats.
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            partitioner = getattr(partitioners, name)(**options)
            partitioner.dataset = table
            count = int(partitioner.num_partitions)
            if count < clients:
                raise ConfigError(
                    f"clients must be at most the {count} partitions that there are, got {clients}"
                )
            return [_indices(partitioner.load_partition(client)) for client in range(clients)]
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"{name}: {' '.join(str(error).split())}") from error


def _indices(part: Any) -> npt.NDArray[np.int64]:
    return np.asarray(part.with_format("numpy")[_INDEX][:], np.int64)


FLWR_PARTITIONS: dict[str, Callable[..., Parts]] = {
    "flwr-iid": flwr_iid,
    "flwr-dirichlet": flwr_dirichlet,
    "flwr-pathological": flwr_pathological,
    "flwr-shard": flwr_shard,
    "flwr-size": flwr_size,
    "flwr-continuous": flwr_continuous,
    "flwr-natural": flwr_natural,
}
"""Those of flwr-datasets by name (extra `hf`)."""
