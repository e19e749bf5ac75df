"""Which figures a run, or several together, deserve: names, titles and captions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from safari.report import figures
from safari.report.gather import (
    ARRIVED,
    NOT_ASKED,
    ArmData,
    RunData,
    Series,
    dense_bytes,
    message_bytes,
    series,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Drawn:
    """A figure with its words. `run` is whose it is; None when it shows all runs together."""

    name: str
    title: str
    caption: str
    figure: Figure
    run: str | None = None


def draw_all(runs: Sequence[RunData]) -> Iterator[Drawn]:
    """Every figure that the records have something to say for, one at a time."""
    yield from _scores(runs)
    yield from _bytes(runs)
    yield from _masks(runs)
    for run in runs:
        yield from _own(run)


def _scores(runs: Sequence[RunData]) -> Iterator[Drawn]:
    targets = {run.config.evaluation.target for run in runs}
    charts = (
        ("top1", "Test accuracy, top-1", "top-1 accuracy (%)", True),
        ("top5", "Test accuracy, top-5", "top-5 accuracy (%)", True),
        ("loss", "Test loss", "test loss", False),
    )
    for column, title, ylabel, percent in charts:
        lines = series(runs, column)
        if not any(len(line.rounds) for line in lines):
            continue
        target = targets.copy().pop() if column == "top1" and len(targets) == 1 else None
        figure = figures.curves(lines, ylabel, percent=percent, target=target)
        yield Drawn(column, title, _band(lines), figure)


def _band(lines: Sequence[Series]) -> str:
    blocks = max(len(line.rounds) for line in lines) > figures.MOST_ROUNDS_ONE_BY_ONE
    seeds = max(len(line.values) for line in lines)
    if blocks:
        over = f"{_count(seeds, 'seed')} and blocks of rounds"
    elif seeds > 1:
        over = _count(seeds, "seed")
    else:
        return "The global model on the test set; one seed."
    return f"The global model on the test set: mean over {over}, in a band of ± one standard deviation."


def _bytes(runs: Sequence[RunData]) -> Iterator[Drawn]:
    up, down = message_bytes(runs, "up"), message_bytes(runs, "down")
    if up or down:
        figure = figures.traffic(up, down, dense_bytes(runs))
        caption = (
            "Bytes of one message as really encoded, in the rounds in which they were counted; mean over "
            "clients and seeds. Dense: the whole model in float32."
        )
        yield Drawn("bytes", "Bytes", caption, figure)


def _masks(runs: Sequence[RunData]) -> Iterator[Drawn]:
    support = series(runs, "support")
    if support:
        figure = figures.masks(series(runs, "density"), support, series(runs, "churn"))
        caption = (
            "Share of the prunable weights, mean over seeds: kept in a client's mask, not 0 in the global "
            "model, and become or ceased to be 0 in the round."
        )
        yield Drawn("masks", "Masks", caption, figure)


def _own(run: RunData) -> Iterator[Drawn]:
    """What belongs to one run alone: arrivals and similarities of each arm's first seed, its data."""
    for names, arm in _distinct_arrivals(run):
        yield Drawn(
            f"arrivals-{arm.name}",
            f"Arrivals: {', '.join(names)}",
            f"Whose update arrived in which round, seed {arm.trials[0].seed}.",
            figures.arrivals(arm.status),
            run.name,
        )
    for arm in run.arms:
        if arm.similarity is not None and len(arm.similarity) > 1:
            yield Drawn(
                f"similarity-{arm.name}",
                f"Similarity: {arm.name}",
                f"What the server holds each pair of clients for, at the last checkpoint of seed "
                f"{arm.trials[0].seed}; the diagonal is left out.",
                figures.similarity(arm.similarity),
                run.name,
            )
    if run.label_counts is not None:
        yield Drawn(
            "labels",
            "Labels",
            f"Training samples of each class at each client, seed {run.config.seed}.",
            figures.label_counts(run.label_counts),
            run.name,
        )


def _distinct_arrivals(run: RunData) -> list[tuple[list[str], ArmData]]:
    """Arms whose arrivals are the same share a figure; where everything arrived there is none."""
    groups: list[tuple[list[str], ArmData]] = []
    for arm in run.arms:
        if np.isin(arm.status, (ARRIVED, NOT_ASKED)).all():
            continue
        for names, other in groups:
            if np.array_equal(arm.status, other.status):
                names.append(arm.name)
                break
        else:
            groups.append(([arm.name], arm))
    return groups


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"
