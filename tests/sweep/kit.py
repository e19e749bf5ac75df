"""What the tests of sweeps share: files that take a second."""

from __future__ import annotations

from pathlib import Path

from safari.sweep import Unit

BASE = """
name = "tiny"
rounds = 4
seeds = 2
clients = 4
arms = ["perfect", "drop", "safari"]
[model]
name = "mlp"
hidden = [8]
[local]
steps = 2
batch = 8
[uplink]
name = "bernoulli"
p = [1, 0.5]
[evaluation]
every = 1
last = 2
target = 0.1
[wire]
every = 0
[checkpoint]
every = 2
"""

TINY = """
title = "Tiny"
base = "base/tiny.toml"

[axes.pruner]
mag = { pruning.pruner = "mag" }
rand = { pruning.pruner = "rand" }

[quick]
set = { rounds = 2 }
"""


def write(folder: Path, **files: str) -> Path:
    """A folder of sweeps: `tiny` where none is named."""
    (folder / "base").mkdir(parents=True, exist_ok=True)
    (folder / "base/tiny.toml").write_text(BASE)
    for name, text in (files or {"tiny": TINY}).items():
        (folder / f"{name}.toml").write_text(text)
    return folder


class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, str]] = []
        self.rounds: dict[str, int] = {}

    def begin(self, worker: int, unit: Unit) -> None:
        assert unit.label not in dict(self.ended)

    def at(self, worker: int, unit: Unit, rounds: int, text: str) -> None:
        self.rounds[unit.label] = rounds

    def end(self, worker: int, unit: Unit, problem: str) -> None:
        self.ended.append((unit.label, problem))
