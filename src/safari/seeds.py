"""Randomness as a pure function of the run's seed and of what it is for.

Every draw has a path of its own, such as `("batches", client, round)`. So no draw depends on how many
others came before it: adding a client changes nobody else's numbers, and a run that goes on after a
crash needs no generator state.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive(seed: int, *path: str | int) -> int:
    """A 64-bit number for this seed and path.

    >>> derive(0, "batches", 3, 7) == derive(0, "batches", 3, 7)
    True
    >>> derive(0, "batches", 3, 7) == derive(0, "batches", 37)
    False
    """
    text = "/".join([str(seed), *(f"{type(part).__name__}:{part}" for part in path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(seed: int, *path: str | int) -> np.random.Generator:
    """A numpy generator of its own for this seed and path."""
    return np.random.Generator(np.random.PCG64(derive(seed, *path)))


def torch_generator(seed: int, *path: str | int) -> torch.Generator:
    """A torch generator (on the CPU) of its own for this seed and path."""
    return torch.Generator().manual_seed(derive(seed, *path) >> 1)
