"""Data sets, how they are divided among the clients, and augmentation."""

from __future__ import annotations

from collections.abc import Callable

from safari.data.augment import (
    AUGMENTATIONS,
    Augmentation,
    crop_and_flip,
    draw_crop_and_flip,
)
from safari.data.cifar10 import cifar10
from safari.data.dataset import (
    IGNORED,
    Data,
    Scaling,
    as_data,
    from_datasets,
    from_tensors,
    hold_out,
    hold_out_of_each,
)
from safari.data.dialogue import dialogue, perplexity_bound
from safari.data.digits import digits
from safari.data.flwr_partitions import FLWR_PARTITIONS
from safari.data.huggingface import from_hf, hf
from safari.data.leaf import leaf
from safari.data.partitions import (
    OWN_PARTITIONS,
    Parts,
    dirichlet,
    divide,
    groups,
    iid,
    label_counts,
    natural,
    shards,
)
from safari.data.text_file import text
from safari.kinds import Kind

DATASETS: Kind[Callable[..., Data]] = Kind(
    "data",
    object,
    {
        "digits": digits,
        "cifar10": cifar10,
        "dialogue": dialogue,
        "hf": hf,
        "leaf": leaf,
        "text": text,
    },
    tables=("data",),
)
"""Data sets by name; the keyword-only parameters of each are its options."""

PARTITIONS: Kind[Callable[..., Parts]] = Kind(
    "partition",
    object,
    OWN_PARTITIONS | FLWR_PARTITIONS,
    tables=("partition",),
    arguments=("labels", "clients", "rng"),
)
"""Partitions by name; the keyword-only parameters of each are its options."""

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "IGNORED",
    "PARTITIONS",
    "Augmentation",
    "Data",
    "Scaling",
    "as_data",
    "cifar10",
    "crop_and_flip",
    "dialogue",
    "digits",
    "dirichlet",
    "divide",
    "draw_crop_and_flip",
    "from_datasets",
    "from_hf",
    "from_tensors",
    "groups",
    "hf",
    "hold_out",
    "hold_out_of_each",
    "iid",
    "label_counts",
    "leaf",
    "natural",
    "perplexity_bound",
    "shards",
    "text",
]
