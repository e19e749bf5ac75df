"""Scores of evaluations on Flower, by the names of a run's metrics: ours, and those of the app itself."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from safari.flower.reply import EXAMPLES
from safari.runs.metrics import CLASSIFICATION, LONGEST_LABEL, MOST_METRICS, RESERVED, RunMetrics
from safari.runs.record import RoundRecord
from safari.tasks import Metric

Scores = Mapping[str, Any]
# Names that are usual in Flower, or here, for what we have a name of our own.
_OURS = {"accuracy": "top1", "eval_acc": "top1"}
# Before a name that a record has taken, and before what the clients found where the server tests, too.
_OWN, FEDERATED = "own_", "federated_"
# In names of what is better when it is lower.
_ERRORS = ("loss", "err", "mae", "mse", "perplexity")


def scored(
    record: RoundRecord, central: Scores | None, federated: Scores | None, average: Scores | None
) -> RoundRecord:
    """The record with all numbers that an evaluation found: at the server, at the clients, of the running average.

    Where the server does not test, the clients' numbers are the scores; otherwise they stand beside them.

    >>> record = RoundRecord(1, (), (), {"loss": None, "top1": None, "top5": None})
    >>> dict(scored(record, {"accuracy": 0.5, "f1": 0.25}, {"accuracy": 0.75}, None).metrics)
    {'loss': None, 'top1': 0.5, 'top5': None, 'f1': 0.25, 'federated_top1': 0.75}
    """
    own = named(central or federated or {})
    beside = (
        {f"{FEDERATED}{name}": value for name, value in named(federated or {}).items()} if central else {}
    )
    return replace(
        record,
        metrics={**record.metrics, **own, **beside},
        average={**dict.fromkeys(CLASSIFICATION.names), **named(average)} if average else None,
    )


def named(scores: Scores) -> dict[str, float | None]:
    """The numbers among the scores, under the names of metrics; None for one that is not finite.

    >>> named({"accuracy": 0.5, "num-examples": 3, "top-3": 0.75, "round": 1, "confusion": [1, 2], "auc": math.inf})
    {'top1': 0.5, 'top_3': 0.75, 'own_round': 1.0, 'auc': None}
    """
    numbers = {
        name: value
        for name, value in scores.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != EXAMPLES
    }
    return {_name(name): float(value) if math.isfinite(value) else None for name, value in numbers.items()}


def _name(name: str) -> str:
    found = _OURS.get(name) or re.sub(r"\W", "_", name)[:LONGEST_LABEL]
    return found if found.isidentifier() and found not in RESERVED else f"{_OWN}{found}"


def metrics_with(known: RunMetrics, names: Iterable[str], *, first: bool) -> RunMetrics:
    """A run's metrics, and those of these names that it does not have yet.

    `first`: nothing was tested before; where no accuracy is among the names, the first of them is the score.

    >>> metrics_with(CLASSIFICATION, ["loss", "top1", "f1"], first=True).score
    'top1'
    >>> found = metrics_with(CLASSIFICATION, ["loss", "mae"], first=True)
    >>> found.score, found["mae"].higher
    ('mae', False)
    """
    names = list(names)
    new = [name for name in names if name not in known.names]
    added = [Metric(name, _label(name), higher=not any(word in name for word in _ERRORS)) for name in new]
    score = known.score
    if first and score not in names and (own := [name for name in names if name != "loss"]):
        score = own[0]
    metrics = (*known.metrics, *added)[:MOST_METRICS]
    return RunMetrics(
        known.task, metrics, score if score in {metric.name for metric in metrics} else known.score
    )


def _label(name: str) -> str:
    return (
        f"{name.removeprefix(FEDERATED)} at the clients"
        if name.startswith(FEDERATED)
        else name.removeprefix(_OWN)
    )
