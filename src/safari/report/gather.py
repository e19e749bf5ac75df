"""A run's records as plain arrays, from which the figures are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from safari.config import Config
from safari.errors import RunError
from safari.report.style import looks_of
from safari.runs import ClientStatus, RoundRecord, RunFolder, RunMetrics, Trial, model_size
from safari.runs.files import is_there
from safari.runs.record import number_names
from safari.runs.similarity import MOST_CLIENTS as MOST_IN_SIMILARITY
from safari.runs.similarity import matrix_in_checkpoint

Floats = NDArray[np.float64]
Codes = NDArray[np.uint8]
Flags = NDArray[np.bool_]

# More cannot be distinguished in a figure.
MOST_CLIENTS = 5_000
MOST_LAYERS = 2_000
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    label: the name at its end.
    rounds: where it has points.
    values: `values[s, k]` is seed s at `rounds[k]`; NaN where there is no number.
    seeds: how many seeds the config asks for; fewer rows in `values` mean that some are not there yet.
    look: which colour and dashes it has; None: by its place among the lines.
    """

    label: str
    rounds: Floats
    values: Floats
    seeds: int
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
    """One arm and seed. `columns[name][k]` is the k-th record; NaN where it has null."""

    seed: int
    columns: Mapping[str, Floats]

    @property
    def rounds(self) -> Floats:
        """The rounds that are recorded."""
        return self.columns["round"]

    @property
    def last(self) -> int:
        """The last recorded round; 0 where there is none."""
        return int(self.rounds[-1]) if len(self.rounds) else 0


@dataclass(frozen=True)
class LayerData:
    """`density[k, l]` and `churn[k, l]` are those of layer l in the k-th record; NaN where unknown."""

    names: tuple[str, ...]
    rounds: Floats
    density: Floats
    churn: Floats

    @property
    def dead(self) -> tuple[str, ...]:
        """The layers without any weight left at the end."""
        return tuple(name for name, left in zip(self.names, self.density[-1], strict=True) if left == 0)

    @property
    def life(self) -> Floats:
        """For how many rounds a weight of each layer stays, on average: kept weights over weights cut a round
        (Little's law), after the first round. Infinite where that is longer than the run so far, NaN where it is
        not known.

        What changed is what was cut and what was grown, and their difference is the change of the density:

        >>> density = np.array([[0.5], [0.5], [0.5]])
        >>> LayerData(("a",), np.arange(1.0, 4.0), density, np.array([[0.5], [0.4], [0.4]])).life
        array([2.5])
        """
        if len(self.density) < 2:
            return np.full(len(self.names), np.nan)
        cut = (self.churn[1:] - np.diff(self.density, axis=0)).clip(min=0) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            life = self.density[:-1].sum(axis=0) / cut.sum(axis=0)
        return np.where(life > len(self.rounds), np.inf, life)


@dataclass(frozen=True)
class ArmData:
    """All that is known of an arm; everything but `trials` is of its first seed.

    status: `status[client, k]` is the `ClientStatus` in the k-th record; no rows beyond `MOST_CLIENTS`.
    stood_in: where another client stood in.
    layers: density and churn of each layer.
    by_class: accuracy of each class, the mean over seeds and the last evaluations; None where it was not measured.
    similarity: the rule's estimate at the last checkpoint; None for a rule that keeps none, and beyond 256 clients.
    size: how many numbers the model has; None before a checkpoint.
    """

    name: str
    trials: tuple[TrialData, ...]
    status: Codes
    stood_in: Flags
    layers: LayerData
    by_class: Floats | None
    similarity: Floats | None
    size: int | None


@dataclass(frozen=True)
class RunData:
    """A run, with the arms that have begun. `skipped` names lines that are damaged and were left out."""

    name: str
    config: Config
    metrics: RunMetrics
    arms: tuple[ArmData, ...]
    label_counts: NDArray[np.int64] | None
    class_names: tuple[str, ...] = ()
    skipped: tuple[str, ...] = field(default=())


def run_names(runs: Sequence[RunFolder]) -> list[str]:
    """A name for each run: the config's; the folder's where two configs share one; a number at last."""
    names = [run.config.name for run in runs]
    if len(set(names)) < len(names):
        names = [run.path.resolve().name for run in runs]
    return [name if names.count(name) == 1 else f"{name} #{i + 1}" for i, name in enumerate(names)]


def read_run(run: RunFolder, name: str | None = None) -> RunData:
    """Read everything that the figures need.

    Args:
        run: the run.
        name: what it is called in the figures; its config's name by default.
    """
    by_arm: dict[str, list[Trial]] = {}
    for trial in run.trials():
        by_arm.setdefault(trial.arm, []).append(trial)
    skipped: list[str] = []
    arms = [_read_arm(arm, trials, run, skipped) for arm, trials in by_arm.items()]
    clients = run.read("clients.json")
    return RunData(
        name=run.config.name if name is None else name,
        config=run.config,
        metrics=run.metrics,
        arms=tuple(arm for arm in arms if arm is not None),
        label_counts=_label_counts(run, clients.get("label_counts")),
        class_names=_class_names(run),
        skipped=tuple(skipped),
    )


def _class_names(run: RunFolder) -> tuple[str, ...]:
    names = run.read("data.json").get("class_names", [])
    return tuple(map(str, names)) if isinstance(names, list) else ()


def arm_looks(configs: Sequence[tuple[str, Config]]) -> dict[tuple[str, str], int]:
    """The look of every arm of some runs, each with its name, begun or not: none changes while a run goes on."""
    arms = [(run, arm) for run, config in configs for arm in config.arms]
    looks = looks_of([arm.rule.name for _, arm in arms])
    return {(run, arm.name): look for (run, arm), look in zip(arms, looks, strict=True)}


def series(runs: Sequence[RunData], column: str) -> list[Series]:
    """A column against rounds, for every arm of every run that has it.

    Metrics, of the model or of the running average, and bytes only where there are some: not every round is
    tested or counted. Seeds that are behind the longest of their arm are left out, so that the mean is over
    the same seeds all along a line.
    """
    found, looks = [], arm_looks([(run.name, run.config) for run in runs])
    for run in runs:
        sparse = column in _now_and_then(run.metrics)
        for arm in run.arms:
            trials = _longest(arm)
            if column not in trials[0].columns:
                continue
            rounds = trials[0].rounds
            for trial in trials[1:]:
                rounds = np.intersect1d(rounds, trial.rounds)
            values = np.stack([t.columns[column][np.isin(t.rounds, rounds)] for t in trials])
            if column in run.metrics.names:
                # A number that was not finite is a gap at a round that was tested.
                tested = np.isfinite(trials[0].columns[run.metrics.score][np.isin(trials[0].rounds, rounds)])
                values, rounds = values[:, tested], rounds[tested]
            elif sparse:
                known = np.asarray(np.isfinite(values).all(axis=0))
                values, rounds = values[:, known], rounds[known]
            found.append(
                Series(label(runs, run, arm), rounds, values, run.config.seeds, looks[run.name, arm.name])
            )
    return found


def message_bytes(runs: Sequence[RunData], direction: str) -> list[Series]:
    """Bytes of one message (`direction` is "up" or "down") in the rounds in which they were counted."""
    return [line for line in series(runs, f"bytes_{direction}") if len(line.rounds)]


def dense_bytes(runs: Sequence[RunData]) -> list[float]:
    """Sizes of a dense float32 model in bytes, ascending; each size once."""
    sizes = [_FLOAT32_BYTES * arm.size for run in runs for arm in run.arms if arm.size is not None]
    return sorted({float(size) for size in sizes})


def label(runs: Sequence[RunData], run: RunData, arm: ArmData) -> str:
    """An arm's name, with the run's before it when there are several."""
    return arm.name if len(runs) == 1 else f"{run.name}/{arm.name}"


def _now_and_then(metrics: RunMetrics) -> set[str]:
    return {f"average_{name}" for name in metrics.names} | {"bytes_up", "bytes_down"}


def _longest(arm: ArmData) -> list[TrialData]:
    last = max(trial.last for trial in arm.trials)
    return [trial for trial in arm.trials if trial.last == last]


def _read_arm(name: str, trials: Sequence[Trial], run: RunFolder, skipped: list[str]) -> ArmData | None:
    """Data of an arm; None where it has no record."""
    metrics, clients = run.metrics, run.config.clients
    read, first, by_class = [], None, []
    for trial in trials:
        problems: list[str] = []
        records = trial.records(clients, problems)
        skipped += [f"{trial.arm}, seed {trial.seed}: {problem}" for problem in problems]
        if records:
            read.append(TrialData(trial.seed, _columns(records, metrics)))
            by_class += last_by_class(records, run.config)
            first = first or (trial, records)
    if first is None:
        return None
    status, stood_in = _statuses(first[1], clients)
    similarity, size = _from_checkpoint(first[0], clients)
    return ArmData(
        name, tuple(read), status, stood_in, _layers(first[1]), _mean_of(by_class), similarity, size
    )


def last_by_class(records: Sequence[RoundRecord], config: Config) -> list[list[float]]:
    """Accuracies by class in the evaluations of the last rounds, which summaries are about."""
    since = config.rounds - config.evaluation.last
    tested = [record for record in records if record.by_class]
    counted = [record for record in tested if record.round > since] or tested[-1:]
    return [[_float(value) for value in record.by_class or ()] for record in counted]


def _mean_of(rows: Sequence[Sequence[float]]) -> Floats | None:
    """The mean of rows of one length; None of none."""
    if not rows or len({len(row) for row in rows}) > 1:
        return None
    table = np.array(rows)
    # A class without test samples is NaN in every row.
    return np.where(
        np.isnan(table).all(0), np.nan, np.nansum(table, 0) / np.maximum(1, (~np.isnan(table)).sum(0))
    )


def _columns(records: Sequence[RoundRecord], metrics: RunMetrics) -> dict[str, Floats]:
    names = number_names(metrics)
    rows = [[_float(numbers[name]) for name in names] for numbers in (r.numbers() for r in records)]
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(names))
    return {name: table[:, k] for k, name in enumerate(names)}


def _statuses(records: Sequence[RoundRecord], clients: int) -> tuple[Codes, Flags]:
    """A row a client, a column a record; no rows where there are too many to draw them."""
    drawn = clients if clients <= MOST_CLIENTS else 0
    status = np.full((drawn, len(records)), ClientStatus.NOT_ASKED, np.uint8)
    stood_in = np.zeros(status.shape, dtype=bool)
    if drawn:
        for k, record in enumerate(records):
            status[:, k] = record.status(clients)
            stood_in[list(record.stood_in), k] = True
    return status, stood_in


def _layers(records: Sequence[RoundRecord]) -> LayerData:
    names = tuple(records[0].layers)[:MOST_LAYERS]
    density = [[_float(record.layers.get(name)) for name in names] for record in records]
    churn = [[_churn(record, name) for name in names] for record in records]
    shape = len(records), len(names)
    rounds = np.array([record.round for record in records], dtype=np.float64)
    return LayerData(names, rounds, np.array(density).reshape(shape), np.array(churn).reshape(shape))


def _churn(record: RoundRecord, name: str) -> float:
    """Churn of a layer: 0 where the record leaves the layer out, NaN where it has no churn at all."""
    return np.nan if record.layer_churn is None else _float(record.layer_churn.get(name, 0.0))


def _float(value: float | None) -> float:
    return np.nan if value is None else float(value)


def _from_checkpoint(trial: Trial, clients: int) -> tuple[Floats | None, int | None]:
    """The similarity matrix, unless it is too large to be drawn, and how many numbers the model has."""
    if not is_there(trial.checkpoint, trial.root):
        return None, None
    size = model_size(trial.checkpoint, trial.root)
    if clients > MOST_IN_SIMILARITY:
        return None, size
    matrix = matrix_in_checkpoint(trial.checkpoint, clients, trial.root)
    return None if matrix is None else matrix.astype(np.float64), size


def _label_counts(run: RunFolder, value: object) -> NDArray[np.int64] | None:
    if value is None:
        return None
    path = run.path / "clients.json"
    try:
        counts = np.array(value, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise RunError(f"{path}: label_counts must be a table of whole numbers: {error}") from error
    if counts.ndim != 2 or not counts.size:
        raise RunError(f"{path}: label_counts must be clients × classes, got shape {counts.shape}")
    return counts
