"""What the tests of the engine share: rounds without a folder, and plug-ins from a real file."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import safari
from safari.config import parse
from safari.engine import World, assemble, engine_of, load_data
from safari.engine.state import State, initial
from safari.runs import RunFolder
from safari.runs.record import RoundRecord

SMALL: dict[str, Any] = {
    "rounds": 5,
    "clients": 5,
    "arms": ["safari"],
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"steps": 2, "batch": 8},
    "engine": {"name": "reference", "device": "cpu", "threads": 1},
}


def world_of(config: dict[str, Any], seed: int = 0) -> World:
    """The world of a config as plain tables."""
    parsed = parse(config)
    return assemble(parsed, seed, load_data(parsed))


def play(config: dict[str, Any], seed: int = 0) -> Iterator[tuple[State, State, RoundRecord]]:
    """Every round of the first arm: the state before, the state after, the record.

    A round writes into the memory of the state that it is given, so each state has one of its own.
    """
    world = world_of(config, seed)
    engine = engine_of(world.config)(world)
    fed = world.federation()
    state = initial(world, fed)
    for _ in range(world.config.rounds):
        following, record, _ = engine(fed, deepcopy(state))
        yield state, following, record
        state = following


def records(config: dict[str, Any], seed: int = 0) -> list[RoundRecord]:
    """The records of the first arm."""
    return [record for _, _, record in play(config, seed)]


def write_trace(path: Path, rounds: list[str]) -> str:
    """A trace file from one text a round, such as "101": clients 0 and 2 are delivered."""
    rows = [f"{t},{client},{got}" for t, row in enumerate(rounds) for client, got in enumerate(row)]
    path.write_text("round,client,delivered\n" + "\n".join(rows) + "\n")
    return str(path)


class StopAfter:
    """A watcher that interrupts a run after this round."""

    def __init__(self, number: int):
        self.number = number

    def start(self, run: Any) -> None:
        """Nothing to begin."""

    def stop(self) -> None:
        """Nothing to end."""

    def round(self, trial: Any, record: RoundRecord) -> None:
        """Interrupt, when it is time."""
        if record["round"] == self.number:
            raise KeyboardInterrupt


def bit_equal_in_halves(
    config: dict[str, Any], folder: Path, stop: int
) -> tuple[dict[str, Tensor], list[Any]]:
    """A run at once, and one that is stopped after a round and resumed, must leave the same checkpoint and records.

    Returns them: the tensors of the first arm's checkpoint, and its records.
    """
    safari.run(config, folder / "at once")
    with pytest.raises(KeyboardInterrupt):
        safari.run(config, folder / "halves", [StopAfter(stop)])
    safari.resume(folder / "halves")
    trials = [RunFolder.open(folder / name).trials()[0] for name in ("at once", "halves")]
    # As bytes: NaN, which stands for what is unknown, is equal to nothing.
    whole, halves = (trial.checkpoint.read_bytes() for trial in trials)
    assert whole == halves
    assert trials[0].records() == trials[1].records()
    return trials[0].load().tensors, trials[0].records()
