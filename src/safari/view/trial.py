"""One arm and seed, followed: its records as columns that grow, and what of them is new."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from safari.errors import RunError
from safari.runs import Trial
from safari.runs.summary import SCORES
from safari.view.arrays import encode_array
from safari.view.follow import LineFollower
from safari.view.snapshots import LAST_ROUND, SimilaritySnapshots

# What became of a client in a round.
NOT_ASKED, ARRIVED, LOST, STOOD_IN, REFUSED = range(5)

NUMBERS = (*SCORES, "train_loss", "density", "agreement", "support", "churn")
COUNTS = ("arrived", "missing", "stood_in", "refused")
COLUMNS = ("round", *NUMBERS, *(f"average_{name}" for name in SCORES), "bytes_up", "bytes_down", *COUNTS)

# Seconds of a round are called what the engine calls them; nobody has so many parts.
MOST_PARTS = 24
MOST_LAYERS = 2000
# Beyond this number clients are counted, but not shown one by one: there are not so many pixels.
MOST_CLIENTS = 5_000


@dataclass(frozen=True)
class Cursor:
    """How much of a trial somebody has got."""

    generation: int = 0
    rounds: int = 0
    seconds: int = 0
    snapshots: int = 0
    problems: int = 0


def drawn_clients(clients: int) -> int:
    """How many of the clients are shown one by one: all or none."""
    return clients if clients <= MOST_CLIENTS else 0


class TrialLog:
    """A trial's records so far. `status`, `whom` and `crowd` hold a number for each round and client.

    trial: whose records. clients: how many clients the config has.
    """

    def __init__(self, trial: Trial, clients: int):
        self.trial, self.clients, self.drawn = trial, clients, drawn_clients(clients)
        self._rounds = LineFollower(trial.rounds, trial.root)
        self._seconds = LineFollower(trial.timings, trial.root)
        self.snapshots = SimilaritySnapshots(trial, clients)
        self._clear()

    def _clear(self) -> None:
        self.columns: dict[str, list[float | None]] = {name: [] for name in COLUMNS}
        self.status, self.whom, self.crowd = bytearray(), array("H"), array("H")
        self.layers: list[str] = []
        self.support, self.churn = array("f"), array("f")
        self.seconds: dict[str, list[float | None]] = {"round": []}

    @property
    def generation(self) -> int:
        """Grows when anything was cut back."""
        return self._rounds.generation + self._seconds.generation + self.snapshots.generation

    @property
    def length(self) -> int:
        """How many rounds there are."""
        return len(self.columns["round"])

    @property
    def problems(self) -> list[str]:
        """A line for each that was skipped, and how many more."""
        found, more = [], 0
        for skipped in (self._rounds.skipped, self._seconds.skipped, self.snapshots.skipped):
            found += skipped.problems
            more += skipped.count - len(skipped.problems)
        return [*found, *([f"{more} more lines were skipped"] if more else [])]

    def poll(self) -> bool:
        """Read what is new; True when anything changed."""
        before = self.cursor
        generations = self._rounds.generation, self._seconds.generation
        lines, timings = self._rounds.read(), self._seconds.read()
        if (self._rounds.generation, self._seconds.generation) != generations:
            # One was cut back: begin again with both, so that they stay in step.
            self._rounds, self._seconds = _again(self._rounds), _again(self._seconds)
            self._clear()
            lines, timings = self._rounds.read(), self._seconds.read()
        for number, record in lines:
            self._add(number, record)
        for number, parts in timings:
            self._add_seconds(number, parts)
        self.snapshots.poll()
        return self.cursor != before

    @property
    def cursor(self) -> Cursor:
        """All of it."""
        seconds, problems = len(self.seconds["round"]), len(self.problems)
        return Cursor(self.generation, self.length, seconds, len(self.snapshots.rounds), problems)

    def since(self, have: Cursor | None) -> dict[str, Any]:
        """What somebody lacks who has got so much (None: all of it, but no details)."""
        fresh = have is None or have.generation != self.generation
        start = Cursor(self.generation) if have is None or fresh else have
        return {
            "generation": self.generation,
            "from": start.rounds,
            "columns": {name: values[start.rounds :] for name, values in self.columns.items()},
            "seconds_from": start.seconds,
            "seconds": {name: values[start.seconds :] for name, values in self.seconds.items()},
            "snapshots": self.snapshots.rounds[start.snapshots :],
            "snapshots_from": start.snapshots,
            "snapshots_note": self.snapshots.note,
            "problems": self.problems,
            "detail": None if fresh or start.rounds == self.length else self.detail(start.rounds),
        }

    def detail(self, start: int = 0) -> dict[str, Any]:
        """Every client and every layer from round number `start` (counted from 0) on."""
        m, layers = self.drawn, len(self.layers)
        return {
            "generation": self.generation,
            "from": start,
            "length": self.length - start,
            "clients": m,
            "layers": self.layers,
            "status": encode_array(np.frombuffer(bytes(self.status), np.uint8)[start * m :], "u1"),
            "whom": encode_array(np.array(self.whom, np.uint16)[start * m :], "u2"),
            "crowd": encode_array(np.array(self.crowd, np.uint16)[start * m :], "u2"),
            "support": encode_array(np.array(self.support, np.float32)[start * layers :], "f4"),
            "churn": encode_array(np.array(self.churn, np.float32)[start * layers :], "f4"),
        }

    def _add(self, number: int, record: Mapping[str, Any]) -> None:
        try:
            row, status, whom, crowd, layers = self._read(record)
        except (
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            AttributeError,
            OverflowError,
            RunError,
        ) as error:
            self._rounds.skipped.note(number, f"not a round's record ({type(error).__name__}: {error})"[:200])
            return
        for name, value in row.items():
            self.columns[name].append(value)
        self.status += status
        self.whom.frombytes(whom)
        self.crowd.frombytes(crowd)
        for into, values in zip((self.support, self.churn), layers, strict=True):
            into.extend(values)

    def _read(self, record: Mapping[str, Any]) -> tuple[Any, ...]:
        """A record checked as a whole, before anything of it is kept."""
        round, rounds = record["round"], self.columns["round"]
        if not _is_round(round) or (rounds and round <= (rounds[-1] or 0)):
            raise RunError(_wrong_round(round, rounds))
        arrived, missing = self._ids(record["arrived"]), self._ids(record["missing"])
        stand_ins = {int(client): who for client, who in record["stand_ins"].items() if who}
        self._ids([client for who in stand_ins.values() for client in who])
        refused = [int(client) for client in record["refused"]]
        refused = [client for client in refused if 0 <= client < self.clients]
        lost = self._ids(list(stand_ins))
        status = np.full(self.drawn, NOT_ASKED, np.uint8)
        whom, crowd = np.zeros(self.drawn, np.uint16), np.zeros(self.drawn, np.uint16)
        if self.drawn:
            status[arrived], status[missing] = ARRIVED, LOST
            status[lost] = STOOD_IN
            whom[lost] = [who[0] + 1 for who in stand_ins.values()]
            crowd[lost] = [len(who) for who in stand_ins.values()]
            status[refused] = REFUSED
        row: dict[str, float | None] = {name: _number(record.get(name)) for name in NUMBERS}
        average = record.get("average") or {}
        row |= {f"average_{name}": _number(average.get(name)) for name in SCORES}
        sizes = record.get("bytes") or {}
        row |= {f"bytes_{way}": _number(sizes.get(way)) for way in ("up", "down")}
        stood_in = len(stand_ins.keys() - set(refused))
        counts = (len(arrived), len(missing), stood_in, len(record["refused"]))
        row |= {"round": round, **dict(zip(COUNTS, counts, strict=True))}
        return row, status.tobytes(), whom.tobytes(), crowd.tobytes(), self._layer_rows(record)

    def _layer_rows(self, record: Mapping[str, Any]) -> tuple[list[float], list[float]]:
        support, churn = record.get("layers") or {}, record.get("layer_churn")
        if not self.layers and not self.length:
            self.layers = [str(name) for name in support][:MOST_LAYERS]
        # A record of before there was churn by layer does not say 0.
        silent = math.nan if churn is None else 0.0
        return (
            [_finite(support.get(name)) for name in self.layers],
            [_finite((churn or {}).get(name, silent)) for name in self.layers],
        )

    def _ids(self, values: Any) -> NDArray[np.int64]:
        if not isinstance(values, list):
            raise RunError("clients must be a list of whole numbers")
        found = np.array(values) if values else np.zeros(0, np.int64)
        if found.ndim != 1 or found.dtype.kind != "i":
            raise RunError("clients must be a list of whole numbers")
        if found.size and not 0 <= found.min() <= found.max() < self.clients:
            raise RunError(f"a client must lie between 0 and {self.clients - 1}")
        return found

    def _add_seconds(self, number: int, parts: Mapping[str, Any]) -> None:
        rounds = self.seconds["round"]
        round: Any = parts.get("round")
        if not _is_round(round) or (rounds and round <= (rounds[-1] or 0)):
            self._seconds.skipped.note(number, _wrong_round(round, rounds))
            return
        try:
            values = {str(name): _number(value) for name, value in parts.items()}
        except (TypeError, OverflowError) as error:
            self._seconds.skipped.note(number, f"not the seconds of a round ({error})")
            return
        for name in values:
            if name not in self.seconds and len(self.seconds) <= MOST_PARTS:
                self.seconds[name] = [None] * len(rounds)
        for name, column in self.seconds.items():
            column.append(values.get(name))


def _again(follower: LineFollower) -> LineFollower:
    return LineFollower(follower.path, follower.root, follower.generation)


def _is_round(value: Any) -> bool:
    return type(value) is int and 1 <= value <= LAST_ROUND


def _wrong_round(value: Any, rounds: Sequence[float | None]) -> str:
    return f"round {value!r:.40} after {rounds[-1] if rounds else 'none'}"


def _number(value: Any) -> float | None:
    """A finite number or None; TypeError for anything else, OverflowError for what is no float."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return float(value) if math.isfinite(value) else None


def _finite(value: Any) -> float:
    number = _number(value)
    return math.nan if number is None else number
