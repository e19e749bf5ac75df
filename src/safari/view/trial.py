"""One arm and seed, followed: its records as columns that grow, and what of them is new."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from safari.report.gather import MOST_CLIENTS, MOST_LAYERS
from safari.runs import CLASSIFICATION, RoundRecord, RunMetrics, Trial
from safari.runs.record import LAST_ROUND, TIME, RecordError, check_order, number_names
from safari.text import visible
from safari.view.arrays import encode_array
from safari.view.follow import LineFollower
from safari.view.snapshots import SimilaritySnapshots

# Parts of a round whose seconds are kept; an engine has fewer.
MOST_PARTS = 24
BY_LAYER = ("layer_density", "layer_churn", "mask_age")
# In `TrialLog.part`: the client's model came whole, or not at all.
WHOLE = 255


@dataclass(frozen=True)
class Cursor:
    """Amount of a trial's data that a page has received."""

    generation: int = 0
    rounds: int = 0
    seconds: int = 0
    snapshots: int = 0
    problems: int = 0


def drawn_clients(clients: int) -> int:
    """Number of clients shown one by one: all or none; they are counted either way."""
    return clients if clients <= MOST_CLIENTS else 0


class TrialLog:
    """A trial's records so far.

    `status` (`ClientStatus`), `stand_in` (the first client that stood in, plus 1), `stand_ins` (how many did) and
    `part` (how much of the model came where it arrived in packets, 0 to 254; `WHOLE` elsewhere) hold a number
    for each round and client; `layer_density`, `layer_churn` and `mask_age` for each round
    and layer.

    trial: whose records. clients: how many clients the config has. metrics: those of the run's task.
    """

    def __init__(self, trial: Trial, clients: int, metrics: RunMetrics = CLASSIFICATION):
        self.trial, self.clients, self.metrics = trial, clients, metrics
        self.drawn = drawn_clients(clients)
        self._rounds = LineFollower(trial.rounds, trial.root)
        self._seconds = LineFollower(trial.timings, trial.root)
        self.snapshots = SimilaritySnapshots(trial, clients)
        self._clear()

    def _clear(self) -> None:
        self.columns: dict[str, list[float | int | None]] = {n: [] for n in number_names(self.metrics)}
        self.status, self.stand_in, self.stand_ins = bytearray(), array("H"), array("H")
        self.part = bytearray()
        self.layers: list[str] = []
        self.layer_density, self.layer_churn, self.mask_age = array("f"), array("f"), array("f")
        self.seconds: dict[str, list[float | None]] = {"round": []}
        self.times: list[str | None] = []
        self.names: dict[int, str] = {}
        # Accuracy of each class in the newest test.
        self.by_class: tuple[float | None, ...] | None = None

    @property
    def generation(self) -> int:
        """Grows when anything was cut back."""
        return self._rounds.generation + self._seconds.generation + self.snapshots.generation

    @property
    def length(self) -> int:
        """Number of rounds."""
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
            # One was cut back: start over with both, so that they stay in step.
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
        """Cursor of a page that has received everything."""
        seconds, problems = len(self.seconds["round"]), len(self.problems)
        return Cursor(self.generation, self.length, seconds, len(self.snapshots.rounds), problems)

    def since(self, have: Cursor | None) -> dict[str, Any]:
        """Data that a page with this cursor lacks (None: everything except the details)."""
        fresh = have is None or have.generation != self.generation
        start = Cursor(self.generation) if have is None or fresh else have
        return {
            "generation": self.generation,
            "from": start.rounds,
            "columns": {name: values[start.rounds :] for name, values in self.columns.items()},
            "seconds_from": start.seconds,
            "seconds": {name: values[start.seconds :] for name, values in self.seconds.items()},
            "times": self.times[start.seconds :],
            "names": self.names,
            "snapshots": self.snapshots.rounds[start.snapshots :],
            "snapshots_from": start.snapshots,
            "snapshots_note": self.snapshots.note,
            "problems": self.problems,
            "dead_layers": self.dead_layers(),
            "by_class": self.by_class,
            "detail": None if fresh or start.rounds == self.length else self.detail(start.rounds),
        }

    def dead_layers(self) -> list[str]:
        """The layers of which nothing is left in the newest round."""
        newest = self.layer_density[-len(self.layers) :] if self.layers else ()
        return [name for name, density in zip(self.layers, newest, strict=True) if density == 0]

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
            "stand_in": encode_array(np.array(self.stand_in, np.uint16)[start * m :], "u2"),
            "stand_ins": encode_array(np.array(self.stand_ins, np.uint16)[start * m :], "u2"),
            "part": encode_array(np.frombuffer(bytes(self.part), np.uint8)[start * m :], "u1"),
            **{
                name: encode_array(np.array(getattr(self, name), np.float32)[start * layers :], "f4")
                for name in BY_LAYER
            },
        }

    def _add(self, number: int, value: Mapping[str, Any]) -> None:
        try:
            record = RoundRecord.from_json(value, self.metrics, self.clients)
            check_order(record, int(self.columns["round"][-1] or 0) if self.length else 0)
        except RecordError as error:
            self._rounds.skipped.note(number, f"not a round's record ({error})"[:200])
            return
        if not self.length:
            self.layers = list(record.layers)[:MOST_LAYERS]
        for name, entry in record.numbers().items():
            self.columns[name].append(entry)
        if self.drawn:
            self._add_clients(record)
            named = record.names or {}
            self.names |= {client: visible(name) for client, name in named.items() if client < self.drawn}
        self.by_class = record.by_class or self.by_class
        self.layer_density.extend(_row(record.layers, self.layers, math.nan))
        # Layers without churn are left out of a record that says it.
        silent = math.nan if record.layer_churn is None else 0.0
        self.layer_churn.extend(_row(record.layer_churn, self.layers, silent))
        self.mask_age.extend(_row(record.mask_age, self.layers, math.nan))

    def _add_clients(self, record: RoundRecord) -> None:
        self.status += record.status(self.drawn).tobytes()
        first, count = np.zeros(self.drawn, np.uint16), np.zeros(self.drawn, np.uint16)
        for client, others in record.stood_in.items():
            first[client], count[client] = others[0] + 1, len(others)
        part = np.full(self.drawn, WHOLE, np.uint8)
        for client, share in (record.parts or {}).items():
            if client < self.drawn and share is not None:
                part[client] = min(max(int(WHOLE * share), 0), WHOLE - 1)
        self.part += part.tobytes()
        self.stand_in.frombytes(first.tobytes())
        self.stand_ins.frombytes(count.tobytes())

    def _add_seconds(self, number: int, parts: Mapping[str, Any]) -> None:
        rounds = self.seconds["round"]
        round: Any = parts.get("round")
        if not _is_round(round) or (rounds and round <= (rounds[-1] or 0)):
            last = rounds[-1] if rounds else "none"
            self._seconds.skipped.note(number, f"round {round!r:.40} after {last}")
            return
        try:
            values = {str(name): _seconds(value) for name, value in parts.items() if name != TIME}
        except (TypeError, OverflowError) as error:
            self._seconds.skipped.note(number, f"not the seconds of a round ({error})")
            return
        for name in values:
            if name not in self.seconds and len(self.seconds) <= MOST_PARTS:
                self.seconds[name] = [None] * len(rounds)
        for name, column in self.seconds.items():
            column.append(values.get(name))
        time = parts.get(TIME)
        self.times.append(visible(time, 40) if isinstance(time, str) else None)


def _again(follower: LineFollower) -> LineFollower:
    return LineFollower(follower.path, follower.root, follower.generation)


def _row(values: Mapping[str, float | None] | None, layers: Sequence[str], missing: float) -> list[float]:
    """A number for each layer; NaN for one that is None."""
    found = (values or {}).get
    row = (found(name, missing) for name in layers)
    return [math.nan if value is None else float(value) for value in row]


def _is_round(value: Any) -> bool:
    return type(value) is int and 1 <= value <= LAST_ROUND


def _seconds(value: Any) -> float | None:
    """A finite number or None; TypeError or OverflowError for anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return float(value) if math.isfinite(value) else None
