"""What the tests of the evidence share: a sweep with claims."""

from __future__ import annotations

from pathlib import Path

from sweep import kit
from sweep.kit import BASE, Listener

__all__ = ["BASE", "TINY", "Listener", "write"]

TINY = """
title = "Tiny"
claim = "words of the paper"
base = "base/tiny.toml"
show = ["curves", "loss", "similarity", "groups"]

[axes.pruner]
mag = { pruning.pruner = "mag" }
rand = { pruning.pruner = "rand" }

[quick]
set = { rounds = 2 }

[[checks]]
says = "SAFARI ends near the perfect network"
arm = "safari"
against = "perfect"
margin = 0.99
"""


def write(folder: Path, **files: str) -> Path:
    """A folder of experiments: `tiny` where none is named."""
    return kit.write(folder, **(files or {"tiny": TINY}))
