"""Where the experiments are, on its own so that nothing has to be imported to find them."""

from __future__ import annotations

from pathlib import Path


def shipped() -> Path:
    """The folder of experiments that comes with the package, or that of the source tree it runs from."""
    inside = Path(__file__).parent / "experiments"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "experiments"
