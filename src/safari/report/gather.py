"""What the figures are drawn from: a run's records as plain arrays, read once and line by line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from safari.config import Config
from safari.errors import RunError
from safari.runs import RunFolder, Trial, model_size, read_lines
from safari.runs.files import is_there
from safari.runs.similarity import matrix_in_checkpoint
from safari.runs.summary import SCORES

Floats = NDArray[np.float64]
Codes = NDArray[np.uint8]

# What became of a client in a round; a larger code says more.
NOT_ASKED, ARRIVED, MISSING, STOOD_IN, REFUSED = range(5)

_NUMBERS = ("top1", "top5", "loss", "train_loss", "density", "agreement", "support", "churn")
_COLUMNS = (*_NUMBERS, *(f"average_{name}" for name in SCORES), "bytes_up", "bytes_down")
# What there is in some rounds alone.
_NOW_AND_THEN = {f"average_{name}" for name in SCORES} | {"bytes_up", "bytes_down"}
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Series:
    """One line of a chart: `values[s, k]` is seed s at `rounds[k]`; NaN where there is no number."""

    label: str
    rounds: Floats
    values: Floats
    # How many seeds the config asks for; fewer rows in `values` mean that some are not there yet.
    seeds: int
    # Which colour and dashes it has; by its place among the lines where nothing is said.
    look: int | None = None

    @property
    def mean(self) -> Floats:
        """Mean over the seeds; NaN as soon as one of them has no number."""
        return np.asarray(self.values.mean(axis=0), dtype=np.float64)

    @property
    def std(self) -> Floats:
        """Sample standard deviation over the seeds; 0 with one seed."""
        rows = len(self.values)
        return self.values.std(axis=0, ddof=1) if rows > 1 else np.zeros(self.values.shape[1])


@dataclass(frozen=True)
class TrialData:
    """One arm and seed. `columns[name][t]` is round t + 1; NaN where the record has null."""

    seed: int
    columns: Mapping[str, Floats]

    @property
    def length(self) -> int:
        """How many rounds are recorded."""
        return len(self.columns["top1"])


@dataclass(frozen=True)
class ArmData:
    """All that is known of an arm. `status`, `similarity` and `size` are of its first seed.

    `status[client, t]` is one of NOT_ASKED, ARRIVED, MISSING, STOOD_IN, REFUSED; `similarity` is None
    for a rule that keeps none; `size` is how many numbers the model has, None before a checkpoint.
    """

    name: str
    trials: tuple[TrialData, ...]
    status: Codes
    similarity: Floats | None
    size: int | None


@dataclass(frozen=True)
class RunData:
    """A run, with the arms that have begun."""

    name: str
    config: Config
    arms: tuple[ArmData, ...]
    label_counts: NDArray[np.int64] | None


def run_names(runs: Sequence[RunFolder]) -> list[str]:
    """A name for each run: the config's; the folder's where two configs share one; a number at last."""
    names = [run.config.name for run in runs]
    if len(set(names)) < len(names):
        names = [run.path.resolve().name for run in runs]
    return [name if names.count(name) == 1 else f"{name} #{i + 1}" for i, name in enumerate(names)]


def read_run(run: RunFolder, name: str | None = None) -> RunData:
    """Everything that the figures need."""
    by_arm: dict[str, list[Trial]] = {}
    for trial in run.trials():
        by_arm.setdefault(trial.arm, []).append(trial)
    arms = [_read_arm(arm, trials, run.config.clients) for arm, trials in by_arm.items()]
    clients = run.read("clients.json")
    return RunData(
        name=run.config.name if name is None else name,
        config=run.config,
        arms=tuple(arm for arm in arms if arm.trials),
        label_counts=_label_counts(run.path / "clients.json", clients.get("label_counts")),
    )


def series(runs: Sequence[RunData], column: str) -> list[Series]:
    """A column against rounds, for every arm of every run; scores only where there was an evaluation.

    Seeds that are behind the longest of their arm are left out, so that a mean never changes
    whom it is over in the middle of a line.
    """
    found = []
    for run in runs:
        for arm in run.arms:
            trials = _longest(arm)
            values = np.stack([trial.columns[column] for trial in trials])
            rounds = np.arange(1, values.shape[1] + 1, dtype=np.float64)
            if column in SCORES:
                at = np.isfinite(trials[0].columns["top1"])
                values, rounds = values[:, at], rounds[at]
            elif column in _NOW_AND_THEN:
                at = np.asarray(np.isfinite(values).all(axis=0))
                values, rounds = values[:, at], rounds[at]
            found.append(Series(label(runs, run, arm), rounds, values, run.config.seeds))
    return found


def message_bytes(runs: Sequence[RunData], direction: str) -> list[Series]:
    """Bytes of one message (`direction` is "up" or "down") in the rounds in which they were counted."""
    return [line for line in series(runs, f"bytes_{direction}") if len(line.rounds)]


def dense_bytes(runs: Sequence[RunData]) -> list[float]:
    """What a message would come to as a dense float32 model; each size once."""
    sizes = [_FLOAT32_BYTES * arm.size for run in runs for arm in run.arms if arm.size is not None]
    return sorted({float(size) for size in sizes})


def label(runs: Sequence[RunData], run: RunData, arm: ArmData) -> str:
    """An arm's name, with the run's before it when there are several."""
    return arm.name if len(runs) == 1 else f"{run.name}/{arm.name}"


def _longest(arm: ArmData) -> list[TrialData]:
    length = max(trial.length for trial in arm.trials)
    return [trial for trial in arm.trials if trial.length == length]


def _read_arm(name: str, trials: Sequence[Trial], clients: int) -> ArmData:
    read = []
    status = np.zeros((clients, 0), dtype=np.uint8)
    first: Trial | None = None
    for trial in trials:
        data, codes = _read_trial(trial, clients, with_status=first is None)
        if data.length:
            read.append(data)
            first, status = first or trial, status if codes is None else codes
    similarity, size = _from_checkpoint(first, clients)
    return ArmData(name, tuple(read), status, similarity, size)


def _read_trial(trial: Trial, clients: int, *, with_status: bool) -> tuple[TrialData, Codes | None]:
    rows: list[list[float]] = []
    codes: list[Codes] = []
    for number, record in enumerate(read_lines(trial.rounds, trial.root), 1):
        try:
            rows.append(_row(record))
            if with_status:
                codes.append(_status(record, clients))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise RunError(
                f"{trial.rounds}, line {number} is not a round's record: {type(error).__name__} {error}"
            ) from error
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(_COLUMNS))
    columns = {name: table[:, k] for k, name in enumerate(_COLUMNS)}
    return TrialData(trial.seed, columns), np.stack(codes, axis=1) if codes else None


def _row(record: Mapping[str, Any]) -> list[float]:
    # Records of before there was one do not name it.
    average = record.get("average") or dict.fromkeys(SCORES)
    values = [*(record[name] for name in _NUMBERS), *(average[name] for name in SCORES)]
    values += [record["bytes"]["up"], record["bytes"]["down"]]
    return [np.nan if value is None else float(value) for value in values]


def _status(record: Mapping[str, Any], clients: int) -> Codes:
    out = np.full(clients, NOT_ASKED, dtype=np.uint8)
    out[record["arrived"]] = ARRIVED
    out[record["missing"]] = MISSING
    out[[int(client) for client in record["stand_ins"]]] = STOOD_IN
    out[[int(client) for client in record["refused"] if 0 <= int(client) < clients]] = REFUSED
    return out


def _from_checkpoint(trial: Trial | None, clients: int) -> tuple[Floats | None, int | None]:
    """The similarity matrix, and how many numbers the model has."""
    if trial is None or not is_there(trial.checkpoint, trial.root):
        return None, None
    matrix = matrix_in_checkpoint(trial.checkpoint, clients, trial.root)
    size = model_size(trial.checkpoint, trial.root)
    return None if matrix is None else matrix.astype(np.float64), size


def _label_counts(path: Path, value: object) -> NDArray[np.int64] | None:
    if value is None:
        return None
    try:
        counts = np.array(value, dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise RunError(f"{path}: label_counts must be a table of whole numbers: {error}") from error
    if counts.ndim != 2 or not counts.size:
        raise RunError(f"{path}: label_counts must be clients × classes, got shape {counts.shape}")
    return counts
