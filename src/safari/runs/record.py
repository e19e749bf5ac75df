"""A round's record: one line of `rounds.jsonl`, the same for both engines and Flower.

Everything that shows a run reads its records through here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from safari.errors import RunError, brief
from safari.runs.files import LONGEST_LINE, is_there, open_plain
from safari.runs.metrics import CLASSIFICATION, RunMetrics

Number = float | int
LAST_ROUND = 10**9
# Classes whose accuracies are recorded one by one.
MOST_BY_CLASS = 100
MOST_CLIENTS = 10**9
# Beyond this, sums of squares and the limits of a chart's axes are no longer finite.
LARGEST_NUMBER = 1e150

# Field of a line of seconds for the time at which the round was recorded (UTC).
TIME = "time"

# In the order in which a line has them; the metrics stand after the round.
_OPTIONAL = ("by_class", "parts", "clients", "mask_age", "reasons", "nodes", "names", "ignored", "resumed")


# What is said of the scores of single clients, over all of them.
OVER_CLIENTS = ("mean", "worst", "spread")


class ClientStatus(IntEnum):
    """Outcome of a round for one client. The page's scripts use the same numbers."""

    NOT_ASKED = 0
    ARRIVED = 1
    # Did not arrive; the record does not say which link lost it.
    LOST = 2
    # Trained, and the upload was lost.
    LOST_UP = 3
    # Did not get the broadcast, and so did not train.
    LOST_DOWN = 4
    # Arrived, but could not be used.
    REFUSED = 5

    @property
    def label(self) -> str:
        """In words."""
        return _LABELS[self]


_LABELS = {
    ClientStatus.NOT_ASKED: "not asked",
    ClientStatus.ARRIVED: "arrived",
    ClientStatus.LOST: "lost",
    ClientStatus.LOST_UP: "lost on the way up",
    ClientStatus.LOST_DOWN: "lost on the way down",
    ClientStatus.REFUSED: "refused",
}


class RecordError(RunError):
    """A line that is not a round's record: the message names the field."""


# Equal where their lines are: the comparison of mappings, not that of a data class.
@dataclass(frozen=True, eq=False)
class RoundRecord(Mapping[str, Any]):
    """Record of one round. It can also be read as the JSON object of its line: `record["top1"]`.

    Attributes
    ----------
    round: counted from 1.
    metrics: what a test of the new global model found, by the metric's name; None where there was no test, or
        the number was not finite.
    average: the same of the running average of the models; None where none is kept, or there was no test.
    train_loss: mean training loss of the clients that arrived.
    trained: clients that are known to have had the broadcast; None in records that do not say.
    arrived, missing: the clients that were asked, by whether their update was used.
    refused: those of the missing whose update arrived and could not be used, with the reason.
    stand_ins: for each missing client whose place others took, these others, the most important first.
    lost: nobody arrived, so that the model stayed as it was.
    parts: for each client of whom only some packets came, the share of its model that did; None where models
        arrive whole or not at all.
    by_class: the accuracy of each class in the test; None where the task has no classes, or there was no test.
    clients: the score on the samples that each client holds out (`scores`), with `mean`, `worst` and `spread`
        over clients; None where clients hold none out, or there was no test.
    density: mean fraction of the prunable weights that a client's mask kept.
    agreement: weights kept by all clients over weights kept by any.
    support: fraction of the prunable weights that are kept: by the server's mask where it chooses one, or else
        those of the new global model that are not 0.
    churn: fraction of them that changed between kept and cut in this round.
    layers: `support` by layer. A layer at 0 is dead: nothing of it is left.
    layer_churn: `churn` by layer; layers without any are left out. None in records that do not say.
    mask_age: by layer, for how many rounds the kept weights have been in the mask, on average; None where the
        mask policy does not keep count.
    bytes: mean size of one message, "up" and "down"; None where they were not counted.
    modes: how many uploads went in which value mode.
    diagnosis: diagnostics of the theory, where they were asked for.
    reasons: on a real network, why each missing client is.
    nodes: on a real network, which node was which client.
    names: on a real network, what the clients that were asked are called there.
    ignored: on a real network, replies that belonged to no client.
    resumed: whether this was the first round of a process that found a checkpoint.
    extra: further fields of the line, as they are.
    """

    round: int
    arrived: tuple[int, ...]
    missing: tuple[int, ...]
    metrics: Mapping[str, Number | None]
    average: Mapping[str, Number | None] | None = None
    train_loss: Number | None = None
    trained: tuple[int, ...] | None = None
    refused: Mapping[int, str] = field(default_factory=dict)
    stand_ins: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    lost: bool = False
    by_class: tuple[Number | None, ...] | None = None
    parts: Mapping[int, Number] | None = None
    clients: Mapping[str, Any] | None = None
    density: Number | None = None
    agreement: Number | None = None
    support: Number | None = None
    churn: Number | None = None
    layers: Mapping[str, Number | None] = field(default_factory=dict)
    layer_churn: Mapping[str, Number | None] | None = None
    mask_age: Mapping[str, Number | None] | None = None
    bytes: Mapping[str, Number | None] = field(default_factory=dict)
    modes: Mapping[str, Number | None] | None = None
    diagnosis: Mapping[str, Number | None] | None = None
    reasons: Mapping[int, str] | None = None
    nodes: Mapping[int, str] | None = None
    names: Mapping[int, str] | None = None
    ignored: tuple[str, ...] | None = None
    resumed: bool | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The object of its line; optional fields that it does not have are left out.

        >>> record = RoundRecord(3, arrived=(0,), missing=(1,), metrics={"loss": 0.5}, stand_ins={1: (0,)})
        >>> [*record.to_json().items()][:3], record["stand_ins"]
        ([('round', 3), ('loss', 0.5), ('average', None)], {'1': [0]})
        """
        return dict(self._json)

    @cached_property
    def _json(self) -> dict[str, Any]:
        optional = {name: getattr(self, name) for name in _OPTIONAL}
        return {
            "round": self.round,
            **self.metrics,
            "average": None if self.average is None else dict(self.average),
            "train_loss": self.train_loss,
            "trained": None if self.trained is None else list(self.trained),
            "arrived": list(self.arrived),
            "missing": list(self.missing),
            "refused": _texts(self.refused),
            "stand_ins": {str(client): list(others) for client, others in self.stand_ins.items()},
            "lost": self.lost,
            "density": self.density,
            "agreement": self.agreement,
            "support": self.support,
            "churn": self.churn,
            "layers": dict(self.layers),
            "layer_churn": None if self.layer_churn is None else dict(self.layer_churn),
            "bytes": dict(self.bytes),
            "modes": None if self.modes is None else dict(self.modes),
            "diagnosis": None if self.diagnosis is None else dict(self.diagnosis),
            **{name: _plain(value) for name, value in optional.items() if value is not None},
            **self.extra,
        }

    def __getitem__(self, key: str) -> Any:
        return self._json[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._json)

    def __len__(self) -> int:
        return len(self._json)

    def with_extra(self, **fields: Any) -> RoundRecord:
        """Copy of the record with further fields, which follow the others in its line."""
        return replace(self, extra={**self.extra, **fields})

    @classmethod
    def from_json(
        cls, value: Mapping[str, Any], metrics: RunMetrics = CLASSIFICATION, clients: int | None = None
    ) -> RoundRecord:
        """A record from the object of its line, checked; RecordError names the field that is wrong.

        Fields that records of an earlier version do not have are None or empty.

        Args:
            value: the object.
            metrics: which of its fields are metrics.
            clients: how many clients there are, where that is known: ids must be below.
        """
        read = _Reader(value, clients)
        trained = None if value.get("trained") is None else read.ids("trained")
        known = {name: getattr(read, kind)(name) for name, kind in _KINDS.items()}
        found = {name: read.number(name) for name in metrics.names}
        return cls(
            round=read.round(),
            arrived=read.ids("arrived"),
            missing=read.ids("missing"),
            metrics=found,
            average=read.average(metrics.names),
            trained=trained,
            extra={key: entry for key, entry in value.items() if key not in _FIELDS and key not in found},
            **known,
        )

    @property
    def stood_in(self) -> dict[int, tuple[int, ...]]:
        """The missing clients whose place others took; not those whose update was refused."""
        return {
            client: others
            for client, others in self.stand_ins.items()
            if others and client not in self.refused
        }

    @property
    def outcomes(self) -> dict[int, ClientStatus]:
        """Outcome for each client that was asked, by ascending id."""
        # On a real network a client that was not heard of may have trained or not.
        known = self.trained is not None and self.reasons is None
        trained = set(self.trained or ())
        silent = ClientStatus.LOST_DOWN if known else ClientStatus.LOST
        found = dict.fromkeys(self.arrived, ClientStatus.ARRIVED)
        found |= {client: ClientStatus.LOST_UP if client in trained else silent for client in self.missing}
        found |= dict.fromkeys(self.refused, ClientStatus.REFUSED)
        return dict(sorted(found.items()))

    def status(self, clients: int) -> NDArray[np.uint8]:
        """Outcome for each of `clients` clients, as `ClientStatus`."""
        out = np.full(clients, ClientStatus.NOT_ASKED, np.uint8)
        found = {client: status for client, status in self.outcomes.items() if client < clients}
        out[list(found)] = list(found.values())
        return out

    def numbers(self) -> dict[str, Number | None]:
        """Everything of the record that is one number, by name: a row of a table.

        >>> record = RoundRecord(3, (0,), (1,), {"loss": 0.5}, bytes={"up": 70.0})
        >>> {name: value for name, value in record.numbers().items() if value}
        {'round': 3, 'loss': 0.5, 'bytes_up': 70.0, 'arrived': 1, 'missing': 1}
        """
        average = self.average or {}
        return {
            "round": self.round,
            **self.metrics,
            **{f"average_{name}": average.get(name) for name in self.metrics},
            "train_loss": self.train_loss,
            "density": self.density,
            "agreement": self.agreement,
            "support": self.support,
            "churn": self.churn,
            "bytes_up": self.bytes.get("up"),
            "bytes_down": self.bytes.get("down"),
            "arrived": len(self.arrived),
            "missing": len(self.missing),
            "stood_in": len(self.stood_in),
            "refused": len(self.refused),
        }


def number_names(metrics: RunMetrics) -> tuple[str, ...]:
    """The names that `RoundRecord.numbers` has in a run with these metrics."""
    return tuple(RoundRecord(1, (), (), dict.fromkeys(metrics.names)).numbers())


def read_records(
    path: Path,
    root: Path | None = None,
    metrics: RunMetrics = CLASSIFICATION,
    *,
    clients: int | None = None,
    skipped: list[str] | None = None,
) -> list[RoundRecord]:
    """The records in a file; a last line that is still being written is left out.

    Args:
        path: `rounds.jsonl` of a trial.
        root: the run's folder, below which no link is followed; the file's own by default.
        metrics: the metrics of the run's task.
        clients: how many clients there are, where that is known.
        skipped: where damaged lines are named. Without it, the first one raises a RunError.
    """
    found: list[RoundRecord] = []
    for number, line in _lines(path, root):
        try:
            record = RoundRecord.from_json(parse_object(line), metrics, clients)
            check_order(record, found[-1].round if found else 0)
        except RecordError as error:
            problem = f"line {number} is not a round's record: {error}"
            if skipped is None:
                raise RunError(f"{path}, {problem}") from error
            skipped.append(f"{path.name}, {problem}")
        else:
            found.append(record)
    return found


def parse_object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line; RecordError where it is something else."""
    if len(line) >= LONGEST_LINE:
        raise RecordError(f"it is longer than {LONGEST_LINE:,} bytes")
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        words = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RecordError(f"not JSON ({words})") from error
    if not isinstance(value, dict):
        raise RecordError(f"not a JSON object but {type(value).__name__}")
    return value


def check_order(record: RoundRecord, last: int) -> None:
    """RecordError for a round that does not come after the last one."""
    if record.round <= last:
        raise RecordError(f"round {record.round} after {last}")


def _lines(path: Path, root: Path | None) -> Iterator[tuple[int, bytes]]:
    """The whole lines, with their numbers; of one that is too long, its beginning."""
    if not is_there(path, root):
        return
    with open_plain(path, root) as handle:
        number, inside = 0, False
        while line := handle.readline(LONGEST_LINE):
            whole = line.endswith(b"\n")
            if not inside and (whole or len(line) == LONGEST_LINE):
                number += 1
                yield number, line
            inside = not whole


class _Reader:
    """The fields of a JSON object, each checked."""

    def __init__(self, value: Mapping[str, Any], clients: int | None):
        self._value, self._clients = value, clients

    def round(self) -> int:
        value = self._value.get("round")
        if type(value) is not int or not 1 <= value <= LAST_ROUND:
            raise RecordError(f"round must be a whole number from 1 to {LAST_ROUND}, got {_short(value)}")
        return value

    def number(self, name: str) -> Number | None:
        return _number(self._value.get(name), name)

    def flag(self, name: str) -> bool:
        value = self._value.get(name, False)
        if not isinstance(value, bool):
            raise RecordError(f"{name} must be true or false, got {_short(value)}")
        return value

    def optional_flag(self, name: str) -> bool | None:
        return None if self._value.get(name) is None else self.flag(name)

    def ids(self, name: str) -> tuple[int, ...]:
        if name not in self._value:
            raise RecordError(f"{name} is missing")
        return self._checked(self._value[name], name)

    def numbers(self, name: str) -> dict[str, Number | None]:
        return {key: _number(value, f"{name}.{key}") for key, value in self._table(name).items()}

    def optional_numbers(self, name: str) -> dict[str, Number | None] | None:
        return None if self._value.get(name) is None else self.numbers(name)

    def sizes(self, name: str) -> dict[str, Number | None]:
        return {"up": None, "down": None, **self.numbers(name)}

    def average(self, names: Sequence[str]) -> dict[str, Number | None] | None:
        found = self.optional_numbers("average")
        return None if found is None else {**dict.fromkeys(names), **found}

    def texts(self, name: str) -> dict[int, str]:
        return {self._client(key, name): str(value) for key, value in self._table(name).items()}

    def optional_texts(self, name: str) -> dict[int, str] | None:
        return None if self._value.get(name) is None else self.texts(name)

    def optional_scores(self, name: str) -> dict[str, Any] | None:
        """Scores by client: some numbers over all of them, and a list."""
        if self._value.get(name) is None:
            return None
        table = self._table(name)
        listed = table.get("scores")
        if not isinstance(listed, list):
            raise RecordError(f"{name}.scores must be a list of numbers, got {_short(listed)}")
        if self._clients is not None and len(listed) > self._clients:
            raise RecordError(f"{name}.scores must have at most {self._clients} numbers, got {len(listed)}")
        found: dict[str, Any] = {key: _number(table.get(key), f"{name}.{key}") for key in OVER_CLIENTS}
        return {**found, "scores": [_number(score, f"{name}.scores") for score in listed]}

    def optional_row(self, name: str) -> tuple[Number | None, ...] | None:
        value = self._value.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > MOST_BY_CLASS:
            raise RecordError(
                f"{name} must be a list of at most {MOST_BY_CLASS} numbers, got {_short(value)}"
            )
        return tuple(_number(each, name) for each in value)

    def optional_shares(self, name: str) -> dict[int, Number] | None:
        if self._value.get(name) is None:
            return None
        found: dict[int, Number] = {}
        for key, value in self._table(name).items():
            share = _number(value, f"{name}.{key}")
            if share is None or not 0 <= share <= 1:
                raise RecordError(f"{name}.{key} must lie between 0 and 1, got {_short(value)}")
            found[self._inside(self._client(key, name), name)] = share
        return found

    def optional_list(self, name: str) -> tuple[str, ...] | None:
        value = self._value.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise RecordError(f"{name} must be a list of texts, got {_short(value)}")
        return tuple(map(str, value))

    def groups(self, name: str) -> dict[int, tuple[int, ...]]:
        found = {}
        for key, value in self._table(name).items():
            found[self._inside(self._client(key, name), name)] = self._checked(value, f"{name}.{key}")
        return found

    def _table(self, name: str) -> Mapping[str, Any]:
        value = self._value.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise RecordError(f"{name} must be a table, got {_short(value)}")
        return value

    def _client(self, key: str, name: str) -> int:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise RecordError(f"{name} must be by client, got {_short(key)}")
        return int(key)

    def _checked(self, value: Any, name: str) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(type(client) is int for client in value):
            raise RecordError(f"{name} must be a list of client numbers, got {_short(value)}")
        if value:
            self._inside(min(value), name)
            self._inside(max(value), name)
        return tuple(value)

    def _inside(self, client: int, name: str) -> int:
        last = MOST_CLIENTS - 1 if self._clients is None else self._clients - 1
        if not 0 <= client <= last:
            raise RecordError(f"{name}: a client must lie between 0 and {last}, got {_short(client)}")
        return client


# How each field is read; the rest is read one by one.
_KINDS = {
    "train_loss": "number",
    "refused": "texts",
    "stand_ins": "groups",
    "lost": "flag",
    "by_class": "optional_row",
    "parts": "optional_shares",
    "clients": "optional_scores",
    "density": "number",
    "agreement": "number",
    "support": "number",
    "churn": "number",
    "layers": "numbers",
    "layer_churn": "optional_numbers",
    "mask_age": "optional_numbers",
    "bytes": "sizes",
    "modes": "optional_numbers",
    "diagnosis": "optional_numbers",
    "reasons": "optional_texts",
    "nodes": "optional_texts",
    "names": "optional_texts",
    "ignored": "optional_list",
    "resumed": "optional_flag",
}
_FIELDS = {*_KINDS, "round", "average", "trained", "arrived", "missing"}


def _number(value: Any, name: str) -> Number | None:
    """A number as it is; None for NaN, infinities and numbers beyond `LARGEST_NUMBER`."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecordError(f"{name} must be a number, got {_short(value)}")
    try:
        return value if abs(float(value)) <= LARGEST_NUMBER else None
    except OverflowError as error:
        raise RecordError(f"{name} must be a number that fits into a float, got {_short(value)}") from error


def _short(value: Any) -> str:
    return brief(value, 40)


def _texts(table: Mapping[int, str]) -> dict[str, str]:
    return {str(client): text for client, text in table.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): entry for key, entry in value.items()}
    return list(value) if isinstance(value, tuple) else value
