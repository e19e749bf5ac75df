"""Metrics of a run's task, and which of them is the score: `task.json` in its folder.

Code that shows a run takes names, labels, formats and directions from here and never imports the task, which
may be somebody else's code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safari.errors import ConfigError, RunError
from safari.runs.files import read_object
from safari.tasks import Metric, Task, classification
from safari.text import visible

FILE = "task.json"
# More than any task has; each is a chart, and a column of the table.
MOST_METRICS = 32
LONGEST_LABEL = 80


@dataclass(frozen=True)
class RunMetrics:
    """The metrics of a run's task.

    Parameters
    ----------
    task: the task's name.
    metrics: one description a metric, in the order in which tables show them.
    score: the name of the metric that ranks models.
    """

    task: str
    metrics: tuple[Metric, ...]
    score: str

    @classmethod
    def of(cls, task: Task) -> RunMetrics:
        """Metrics of a task; ConfigError where one has the name of another field of a record."""
        taken = sorted(RESERVED.intersection(metric.name for metric in task.metrics))
        if taken:
            raise ConfigError(
                f"{task.name}: a metric must not be called {taken[0]!r}: records have a field of that name"
            )
        return cls(task.name, task.metrics, task.score)

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics' names as records have them: the loss first, then in the order of the tables.

        >>> CLASSIFICATION.names
        ('loss', 'top1', 'top5')
        """
        names = [metric.name for metric in self.metrics]
        return tuple(sorted(names, key=lambda name: name != "loss"))

    @property
    def main(self) -> Metric:
        """The metric that ranks models."""
        return self[self.score]

    def __getitem__(self, name: str) -> Metric:
        return next(metric for metric in self.metrics if metric.name == name)

    def tell(self, found: Mapping[str, float | None]) -> str:
        """The score and the loss in a line, for progress; empty where there was no test.

        >>> CLASSIFICATION.tell({"top1": 0.8125, "loss": None}), CLASSIFICATION.tell({"top1": None})
        ('top-1  81.2%  loss inf', '')
        """
        if found.get(self.score) is None:
            return ""
        names = dict.fromkeys((self.score, *(name for name in ("loss",) if name in self.names)))
        return "  ".join(_told(self[name], found.get(name)) for name in names)

    def to_json(self) -> dict[str, Any]:
        """Content of `task.json`."""
        described = [metric.to_dict() for metric in self.metrics]
        return {"task": self.task, "score": self.score, "metrics": described}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunMetrics:
        """From what `task.json` holds; RunError names what is wrong with it."""
        described = value.get("metrics")
        if not isinstance(described, list) or not 1 <= len(described) <= MOST_METRICS:
            raise RunError(f"{FILE}: metrics must be a list of 1 to {MOST_METRICS} metrics")
        metrics = tuple(_metric(entry) for entry in described)
        names = [metric.name for metric in metrics]
        if len(set(names)) < len(names):
            raise RunError(f"{FILE}: metrics must have different names, got {', '.join(names)}")
        if value.get("score") not in names:
            score = str(value.get("score"))[:LONGEST_LABEL]
            raise RunError(f"{FILE}: score must be one of {', '.join(names)}; got {score!r}")
        return cls(str(value.get("task", ""))[:LONGEST_LABEL], metrics, value["score"])


# Fields of a record, a summary or a table made of records that are not metrics.
RESERVED = frozenset({
    "round", "average", "train_loss", "trained", "arrived", "missing", "parts", "refused", "stand_ins", "stood_in",
    "lost", "density", "agreement", "support", "churn", "layers", "layer_churn", "mask_age", "bytes",
    "bytes_up", "bytes_down", "modes", "diagnosis", "reasons", "nodes", "names", "ignored", "resumed", "seed", "arm",
    "clients", "clients_mean", "clients_worst", "clients_spread", "client_scores",
    "rounds", "finished", "rounds_to_target", "rounds_to_stay", "reached_target", "stayed_at_target",
    "lost_updates", "seeds", "seconds", "by_class",
})  # fmt: skip

CLASSIFICATION = RunMetrics.of(classification())


def read_metrics(folder: Path) -> RunMetrics:
    """The metrics of the run in a folder; those of classification where it does not say.

    RunError when its `task.json` cannot be read.
    """
    value = read_object(folder / FILE, folder)
    return RunMetrics.from_json(value) if value else CLASSIFICATION


def metrics_text(metrics: RunMetrics) -> str:
    """The text of `task.json`."""
    return json.dumps(metrics.to_json(), indent=2) + "\n"


def _told(metric: Metric, value: float | None) -> str:
    # A number that is not finite is null in a record.
    text = "inf" if value is None else f"{value:6.1%}" if metric.percent else f"{value:.3f}"
    return f"{metric.short or metric.label} {text}"


def _metric(entry: Any) -> Metric:
    if not isinstance(entry, Mapping):
        raise RunError(f"{FILE}: a metric must be a table, got {type(entry).__name__}")
    texts = {key: entry.get(key, "") for key in ("name", "label", "short")}
    flags = {key: entry.get(key, default) for key, default in (("percent", False), ("higher", True))}
    for key, text in texts.items():
        if not isinstance(text, str) or len(text) > LONGEST_LABEL:
            raise RunError(f"{FILE}: a metric's {key} must be a text of at most {LONGEST_LABEL} characters")
    for key, flag in flags.items():
        if not isinstance(flag, bool):
            raise RunError(f"{FILE}: a metric's {key} must be true or false, got {type(flag).__name__}")
    if texts["name"] in RESERVED:
        raise RunError(f"{FILE}: a metric must not be called {texts['name']!r}")
    # Tables print them on a terminal.
    shown = {key: visible(texts[key], LONGEST_LABEL) for key in ("label", "short")}
    try:
        return Metric(**(texts | shown | {"label": shown["label"] or texts["name"]}), **flags)
    except ConfigError as error:
        raise RunError(f"{FILE}: {error}") from error
