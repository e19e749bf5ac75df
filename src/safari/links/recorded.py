"""A packet-level link that replays the arrivals of a real network, coordinate by coordinate.

A run over datagrams writes, for each round and client, which coordinates of the client's model arrived (`blocks`
in rounds.jsonl). This link gives a simulation the same arrivals, so that another rule or another model of the
same layout can be compared on them, and so that the network can be compared with the simulator.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from safari.bounds import path_of
from safari.errors import ConfigError, DataError
from safari.links.link import Bools, Setting, State
from safari.links.packets import Ints, PacketLink, Ranges
from safari.runs import read_lines

# A record holds at most 5,000 ranges a round; this bounds what a file can ask for to 256 MiB.
MOST_RANGES = 2**23


def recorded(*, file: str = "") -> PacketLink:
    """The arrivals of a run over datagrams.

    Args:
        file: The rounds.jsonl of that run. Its clients must be as many as this run's, and its rounds at least
            as many.
    """
    if not file:
        raise ConfigError("file must name the rounds.jsonl of a run over datagrams, got ''")

    path = path_of("file", file)

    def init(setting: Setting) -> State:
        return read_arrivals(path, setting.clients)

    def apply(state: State, t: int, counts: Ints, rng: np.random.Generator) -> tuple[list[Bools], State]:
        raise ConfigError("packets.name 'recorded' replays ranges of coordinates, not packets")

    def ranges(state: State, t: int) -> Ranges:
        found: dict[int, list[tuple[int, int]]] = {}
        for client, first, count in state["ranges"][state["ranges"][:, 0] == t][:, 1:].tolist():
            found.setdefault(client, []).append((first, count))
        return found

    return PacketLink(
        init, apply, lambda count: count, ranges=ranges, rounds=lambda state: int(state["rounds"][0])
    )


def read_arrivals(path: Path, clients: int) -> State:
    """The state of the link: rows (round from 0, client, first coordinate, count), and the number of rounds."""
    if not path.is_file():
        raise DataError(f"{path}: no such file of records")
    rows: list[tuple[int, int, int, int]] = []
    rounds = 0
    for record in read_lines(path):
        for client, block in _blocks(path, rounds, record, clients):
            rows += [(rounds, client, *pair) for pair in _pairs(path, rounds, client, block)]
        if len(rows) > MOST_RANGES:
            raise DataError(f"{path}: must hold at most {MOST_RANGES} ranges, found more")
        rounds += 1
    if not rounds:
        raise DataError(f"{path}: holds no rounds")
    return {"ranges": np.array(rows, np.int64).reshape(-1, 4), "rounds": np.array([rounds])}


def _blocks(path: Path, t: int, record: dict[str, Any], clients: int) -> list[tuple[int, Any]]:
    # A round in which nobody was asked has no blocks; a run that does not go by datagrams never has any.
    blocks = record.get("blocks", {} if record.get("lost") else None)
    if not isinstance(blocks, dict):
        raise DataError(f"{path}, round {t + 1}: needs blocks, which runs over datagrams record")
    arrived = record.get("arrived")
    out = []
    for name, block in blocks.items():
        client = int(name) if name.isdecimal() and len(name) < 10 else -1
        if not 0 <= client < clients:
            raise DataError(
                f"{path}, round {t + 1}: client must lie between 0 and {clients - 1}, got {name[:20]!r}"
            )
        # What came of a client that was refused, or of one that never gave its name, was not used.
        if isinstance(arrived, list) and client in arrived:
            out.append((client, block))
    return out


def _pairs(path: Path, t: int, client: int, block: Any) -> list[tuple[int, int]]:
    found = block.get("ranges") if isinstance(block, dict) else None
    if not isinstance(found, list):
        raise DataError(f"{path}, round {t + 1}, client {client}: needs ranges, which long records leave out")
    for pair in found:
        good = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
        if not good or not (0 <= pair[0] < 2**48 and 0 < pair[1] < 2**48):
            raise DataError(
                f"{path}, round {t + 1}, client {client}: a range must be [first, count], got {str(pair)[:40]}"
            )
    return [(first, count) for first, count in found]
