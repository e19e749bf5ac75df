"""Arrays that are filled once: in memory where they fit, in a memory-mapped file where they are large."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MOST_IN_MEMORY = 2**30
"""Bytes of an array that is still held in memory."""


def filled(
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    key: tuple[Any, ...],
    fill: Callable[[npt.NDArray[Any]], None],
) -> Tensor:
    """A tensor that `fill` writes into, once.

    One of more than `MOST_IN_MEMORY` bytes is a file under `cache_folder`, mapped into memory: what is read
    of it is in memory only while the system has room. The next run finds it there by `key`, plain values that
    name all that its numbers follow from. It is written under a temporary name and renamed when it is whole.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size <= MOST_IN_MEMORY:
        array = np.empty(shape, dtype)
        fill(array)
        return torch.from_numpy(array)
    name = hashlib.sha256(json.dumps([*key, shape, np.dtype(dtype).str]).encode()).hexdigest()[:32]
    path = cache_folder() / f"{name}.npy"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(suffix=".npy", dir=path.parent)
        os.close(handle)
        try:
            mapped = np.lib.format.open_memmap(temporary, "w+", np.dtype(dtype), shape)
            fill(mapped)
            mapped.flush()
            del mapped
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    # Copy-on-write: torch warns of memory that it may not write to, and nobody else's file changes.
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))


def cache_folder() -> Path:
    """Folder of large arrays: `$XDG_CACHE_HOME/safari`, or `~/.cache/safari`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "safari"
