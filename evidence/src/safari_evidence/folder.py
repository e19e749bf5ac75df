"""Folder of the experiments, in a module of its own so that finding them imports nothing else."""

from __future__ import annotations

from pathlib import Path


def shipped() -> Path:
    """The folder of experiments that comes with the package, or that of the source tree it runs from."""
    inside = Path(__file__).parent / "experiments"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "experiments"
