"""Partitions: the assignment of samples to clients.

A partition is a function of the training labels, the number of clients and a generator; its keyword-only
parameters are its options. It returns the indices of the samples that each client holds: disjoint and not
empty. One that names a fourth argument, `owners`, receives the owner of each sample, where the data name owners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from safari.errors import ConfigError, DataError
from safari.plugins import named_arguments

if TYPE_CHECKING:
    from safari.data.dataset import Data

Labels: TypeAlias = npt.NDArray[np.int64]
Parts: TypeAlias = "list[npt.NDArray[np.int64]]"

# Shares are equal to nine digits by then; far above, the sum behind a Dirichlet draw overflows.
LARGEST_ALPHA = 1e18


def divide(
    partition: Callable[..., Parts],
    data: Data,
    clients: int,
    rng: np.random.Generator,
    options: Mapping[str, Any],
) -> Parts:
    """The training samples of a data set, divided: a partition gets the owners where it asks for them."""
    owners = None if data.owners is None else data.owners.numpy()
    extra = named_arguments(partition, owners=owners)
    return partition(data.train_y.numpy(), clients, rng, **extra, **options)


def groups(labels: Labels, clients: int, rng: np.random.Generator, *, groups: int = 2) -> Parts:
    """Clients in groups, each group with its own labels and IID inside, as in the paper.

    Classes and clients are cut into `groups` contiguous blocks; the first blocks are larger by one where the
    division leaves a rest.

    >>> labels = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    >>> [labels[part].tolist() for part in groups(labels, 2, np.random.default_rng(0))]
    [[0, 0, 1, 1], [2, 2, 3, 3]]
    """
    present, rank = _classes(labels, clients)
    _whole("groups", groups, 1)
    if groups > len(present):
        raise ConfigError(f"groups must be at most the number of classes ({len(present)}), got {groups}")
    if groups > clients:
        raise ConfigError(f"groups must be at most the number of clients ({clients}), got {groups}")
    group_of_sample = _blocks(len(present), groups)[rank]
    group_of_client = _blocks(clients, groups)
    owner = np.empty(len(labels), np.int64)
    for group in range(groups):
        samples, holders = np.flatnonzero(group_of_sample == group), np.flatnonzero(group_of_client == group)
        if len(samples) < len(holders):
            raise ConfigError(
                "groups must leave each group a sample for each of its clients; "
                f"with {groups}, group {group} has {len(holders)} clients and {len(samples)} samples"
            )
        owner[rng.permutation(samples)] = holders[np.arange(len(samples)) % len(holders)]
    return _by_owner(owner, clients)


def iid(labels: Labels, clients: int, rng: np.random.Generator) -> Parts:
    """Every client draws from the same distribution, in equal shares.

    >>> [part.tolist() for part in iid(np.zeros(5, np.int64), 2, np.random.default_rng(0))]
    [[1, 2, 3], [0, 4]]
    """
    _enough(labels, clients)
    owner = np.empty(len(labels), np.int64)
    owner[rng.permutation(len(labels))] = np.arange(len(labels)) % clients
    return _by_owner(owner, clients)


def shards(labels: Labels, clients: int, rng: np.random.Generator, *, shards_per_client: int = 2) -> Parts:
    """Samples sorted by label and cut into shards, a few random ones for each client (McMahan et al., 2017).

    >>> labels = np.array([0, 1, 0, 1])
    >>> parts = shards(labels, 2, np.random.default_rng(0), shards_per_client=1)
    >>> sorted(labels[part].tolist() for part in parts)
    [[0, 0], [1, 1]]
    """
    _classes(labels, clients)
    _whole("shards_per_client", shards_per_client, 1)
    most = len(labels) // clients
    if shards_per_client > most:
        raise ConfigError(
            f"shards_per_client must be at most samples / clients ({len(labels)} / {clients} = {most}), "
            f"got {shards_per_client}"
        )
    # Shuffled first, so that which samples of a label make a shard is random too.
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    owner_of_shard = rng.permutation(np.repeat(np.arange(clients), shards_per_client))
    owner = np.empty(len(labels), np.int64)
    owner[by_label] = owner_of_shard[_blocks(len(labels), len(owner_of_shard))]
    return _by_owner(owner, clients)


def dirichlet(
    labels: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: float = 0.3,
    minimum: int = 1,
    by: Literal["labels", "clients"] = "labels",
    balanced: bool = False,
) -> Parts:
    """Each label divided among the clients in Dirichlet(alpha) shares: the smaller alpha, the more skewed.

    A client left with fewer than `minimum` samples is filled up with random ones of the largest clients.
    `by = "clients"`: each client draws its own shares of the labels instead, and a label is divided in their
    proportion (Hsu et al., 2019, as FedAU and FedAWE have it). `balanced`: a client that has its equal share
    of all samples gets none of the labels that follow (as FedML and NIID-Bench divide).

    >>> labels = np.arange(1000) % 10
    >>> parts = dirichlet(labels, 5, np.random.default_rng(0), alpha=0.1, minimum=20)
    >>> sum(map(len, parts)), min(map(len, parts)) >= 20
    (1000, True)
    """
    present, rank = _classes(labels, clients)
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha <= LARGEST_ALPHA:
        raise ConfigError(f"alpha must be above 0 and at most {LARGEST_ALPHA:g}, got {alpha!r}")
    _whole("minimum", minimum, 1)
    most = len(labels) // clients
    if minimum > most:
        raise ConfigError(
            f"minimum must be at most samples / clients ({len(labels)} / {clients} = {most}), got {minimum}"
        )
    owner = np.empty(len(labels), np.int64)
    own = rng.dirichlet(np.full(len(present), float(alpha)), clients) if by == "clients" else None
    sizes = np.zeros(clients, np.int64)
    for label in range(len(present)):
        samples = rng.permutation(np.flatnonzero(rank == label))
        shares = rng.dirichlet(np.full(clients, float(alpha))) if own is None else own[:, label]
        if balanced:
            shares = np.where(sizes * clients < len(labels), shares, 0.0)
        # A tiny alpha may leave nobody a share; then all who may have one have the same.
        if not shares.any():
            shares = (sizes * clients < len(labels)).astype(np.float64)
        edges = np.cumsum(shares)
        # Edges are scaled by the last one, as rounding may leave it below 1 and a sample without an owner.
        owner[samples] = np.searchsorted(edges / edges[-1], (np.arange(len(samples)) + 0.5) / len(samples))
        sizes += np.bincount(owner[samples], minlength=clients)
    return _by_owner(_filled_up(owner, clients, minimum, rng), clients)


def natural(
    labels: Labels,
    clients: int,
    rng: np.random.Generator,
    owners: Labels | None = None,
    *,
    pick: Literal["random", "largest"] = "random",
    minimum: int = 1,
) -> Parts:
    """Each client is one of the data's own: a writer, a speaker, a device, as a column of the data says.

    `clients` owners are picked, at random or those with the most samples, among the owners with at least
    `minimum` samples; the samples of all others are not used.

    >>> owners = np.array([7, 7, 9, 7, 9, 8])
    >>> [part.tolist() for part in natural(owners, 2, np.random.default_rng(0), owners, pick="largest")]
    [[0, 1, 3], [2, 4]]
    """
    if owners is None:
        raise ConfigError(
            "natural needs data that say whose each sample is: name the column (data.owner), "
            "or give Data its owners"
        )
    _enough(labels, clients)
    _whole("minimum", minimum, 1)
    _, code, sizes = np.unique(owners, return_inverse=True, return_counts=True)
    able = np.flatnonzero(sizes >= minimum)
    if clients > len(able):
        having = f" with at least {minimum} samples" if minimum > 1 else ""
        raise ConfigError(
            f"clients must be at most the number of owners{having} ({len(able)}), got {clients}"
        )
    if pick == "random":
        chosen = np.sort(rng.choice(able, clients, replace=False))
    else:
        chosen = np.sort(able[np.argsort(-sizes[able], kind="stable")[:clients]])
    place = np.full(len(sizes), -1)
    place[chosen] = np.arange(clients)
    held = np.flatnonzero(place[code] >= 0)
    return [held[part] for part in _by_owner(place[code][held], clients)]


def label_counts(labels: npt.NDArray[Any], parts: Sequence[Labels], classes: int) -> npt.NDArray[np.int64]:
    """Number of samples of each label at each client: int64[clients, classes].

    Where a sample has several labels (float `[n, classes]` of 0 and 1) each counts; where there is no class
    to count, as with tokens and numbers, there is one column with the samples.

    >>> label_counts(np.array([0, 2, 2]), [np.array([0]), np.array([1, 2])], 3).tolist()
    [[1, 0, 0], [0, 0, 2]]
    >>> label_counts(np.array([[1.0, 1.0], [0.0, 1.0]]), [np.array([0]), np.array([1])], 2).tolist()
    [[1, 1], [0, 1]]
    >>> label_counts(np.array([[0.5], [0.1]]), [np.array([0, 1])], 1).tolist()
    [[2]]
    """
    if labels.dtype.kind == "f" and np.isin(labels, (0, 1)).all():
        return np.array([labels[part].sum(0) for part in parts], np.int64).reshape(len(parts), classes)
    if labels.ndim > 1:
        return np.array([[len(part)] for part in parts], np.int64).reshape(len(parts), 1)
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    held = labels[np.concatenate([np.empty(0, np.int64), *parts])]
    if held.size and not 0 <= held.min() <= held.max() < classes:
        raise DataError(f"labels must lie in 0..{classes - 1}, got {held.min()}..{held.max()}")
    return np.bincount(owner * classes + held, minlength=len(parts) * classes).reshape(len(parts), classes)


def _filled_up(owner: Labels, clients: int, minimum: int, rng: np.random.Generator) -> Labels:
    """Moves samples, one from whoever is largest at a time, until every client has `minimum`."""
    sizes = np.bincount(owner, minlength=clients)
    lacking = np.maximum(minimum - sizes, 0)
    if not lacking.any():
        return owner
    # A sample's place among its owner's, in random order. Taking the highest places first is taking from the
    # largest client each time; places from `minimum` on suffice, since samples >= clients * minimum.
    shuffled = rng.permutation(len(owner))
    grouped = shuffled[np.argsort(owner[shuffled], kind="stable")]
    place = np.arange(len(owner)) - (np.cumsum(sizes) - sizes)[owner[grouped]]
    given = grouped[np.argsort(-place, kind="stable")[: lacking.sum()]]
    filled = owner.copy()
    filled[given] = np.repeat(np.arange(clients), lacking)
    return filled


def _classes(labels: Labels, clients: int) -> tuple[Labels, Labels]:
    """The labels that occur, sorted, and each sample's rank among them."""
    _enough(labels, clients)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        kind = "numbers" if labels.dtype.kind == "f" else "a label for each token"
        raise ConfigError(
            f"it needs one class a sample, and these labels are {kind} ({labels.dtype} of shape "
            f"{[*labels.shape]}); iid and natural need none"
        )
    present, rank = np.unique(labels, return_inverse=True)
    return present, rank


def _enough(labels: npt.NDArray[Any], clients: int) -> None:
    """Check what every partition needs: samples, and no more clients than samples."""
    if not labels.size:
        raise DataError(f"labels must be a non-empty array, got shape {[*labels.shape]}")
    _whole("clients", clients, 1)
    if clients > len(labels):
        raise ConfigError(f"clients must be at most the number of samples ({len(labels)}), got {clients}")


def _whole(field: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise ConfigError(f"{field} must be an integer of at least {low}, got {value!r}")


def _blocks(count: int, blocks: int) -> Labels:
    """The block of each of `count` things cut into contiguous blocks, the first ones larger by one.

    >>> _blocks(5, 2).tolist()
    [0, 0, 0, 1, 1]
    """
    size, rest = divmod(count, blocks)
    return np.repeat(np.arange(blocks), np.where(np.arange(blocks) < rest, size + 1, size))


def _by_owner(owner: Labels, clients: int) -> Parts:
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=clients)).tolist()
    return [order[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


OWN_PARTITIONS: dict[str, Callable[..., Parts]] = {
    "groups": groups,
    "iid": iid,
    "shards": shards,
    "dirichlet": dirichlet,
    "natural": natural,
}
"""Those that need no other library, by name."""
