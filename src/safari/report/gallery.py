"""Choice of figures for a run, or for several together: names, titles, captions; all of them as files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from safari.report import figures
from safari.report.gather import (
    ArmData,
    RunData,
    Series,
    dense_bytes,
    message_bytes,
    read_run,
    run_names,
    series,
)
from safari.report.style import render, styled
from safari.runs import ClientStatus, RunFolder
from safari.runs.files import making, write_atomically
from safari.tasks import Metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Drawn:
    """A figure with its words. `run` names the run that it shows; None when it shows all runs together.

    `same` are the names that it would have for other arms, which would look the same and are not drawn.
    """

    name: str
    title: str
    caption: str
    figure: Figure
    run: str | None = None
    same: tuple[str, ...] = ()


def draw_all(runs: Sequence[RunData]) -> Iterator[Drawn]:
    """Every figure for which the records have data, one at a time."""
    yield from _scores(runs)
    yield from _bytes(runs)
    yield from _masks(runs)
    for run in runs:
        yield from _own(run)


def write_figures(
    runs: RunFolder | Sequence[RunFolder],
    folder: Path,
    kinds: Sequence[Literal["png", "svg", "pdf"]] = ("png", "svg"),
) -> list[Path]:
    """Write every figure into a folder, as PNG and SVG by default, and return the paths.

    MissingExtraError without Matplotlib, before anything is written.
    """
    several = [runs] if isinstance(runs, RunFolder) else list(runs)
    with styled():
        data = [read_run(run, name) for run, name in zip(several, run_names(several), strict=True)]
    paths = list[Path]()
    with making(folder):
        for drawn in draw_all(data):
            whose = "" if drawn.run is None or len(data) == 1 else f"{drawn.run}-"
            stem = _stem(whose + drawn.name, {path.stem.casefold() for path in paths})
            for kind in kinds:
                path = folder / f"{stem}.{kind}"
                write_atomically(path, render(drawn.figure, kind))
                paths.append(path)
                # Everything is in its place now; to work that out again would take a third of the time.
                drawn.figure.set_layout_engine("none")
    return paths


def _stem(name: str, taken: Set[str]) -> str:
    """A file name that is safe in any file system and not taken; a run's name may be that of its folder.

    >>> _stem("my run #2-labels", {"labels"}), _stem("Top1", {"top1", "top1-2"})
    ('my-run-2-labels', 'Top1-3')
    """
    safe = re.sub(r"[^A-Za-z0-9._+]+", "-", name).lstrip(".-") or "figure"
    numbered = (safe if n == 1 else f"{safe}-{n}" for n in count(1))
    return next(stem for stem in numbered if stem.casefold() not in taken)


def _scores(runs: Sequence[RunData]) -> Iterator[Drawn]:
    """A figure a metric, and one for the score of the running average; those of all runs that have it."""
    for metric, averaged in _charts(runs):
        column = f"average_{metric.name}" if averaged else metric.name
        # Of several runs, some may keep no average or have no such metric: their arms are not drawn.
        lines = [line for line in series(runs, column) if np.isfinite(line.values).any()]
        if not lines:
            continue
        ylabel = f"{metric.label} (%)" if metric.percent else metric.label
        figure = figures.curves(lines, ylabel, percent=metric.percent, target=_target(runs, metric))
        title = f"Test {metric.label}" + (" of the running average" if averaged else "")
        whose = "The running average of the global models" if averaged else "The global model"
        yield Drawn(column.replace("_", "-"), title, _band(lines, whose), figure)


def _charts(runs: Sequence[RunData]) -> list[tuple[Metric, bool]]:
    """Metrics with whether it is the running average's: scores first, then their averages, then the rest."""
    scores = {run.metrics.main.name: run.metrics.main for run in runs}
    others = {metric.name: metric for run in runs for metric in run.metrics.metrics}
    return [
        *((metric, False) for metric in scores.values()),
        *((metric, True) for metric in scores.values()),
        *((metric, False) for name, metric in others.items() if name not in scores),
    ]


def _target(runs: Sequence[RunData], metric: Metric) -> float | None:
    """The target for the score, where all runs have the same."""
    targets = {run.config.evaluation.goal(metric.percent) for run in runs if run.metrics.score == metric.name}
    return targets.pop() if len(targets) == 1 else None


def _band(lines: Sequence[Series], whose: str) -> str:
    blocks = max(len(line.rounds) for line in lines) > figures.MOST_ROUNDS_ONE_BY_ONE
    seeds = max(len(line.values) for line in lines)
    if blocks:
        over = f"{_count(seeds, 'seed')} and blocks of rounds"
    elif seeds > 1:
        over = _count(seeds, "seed")
    else:
        return f"{whose} on the test set; one seed."
    return f"{whose} on the test set: mean over {over}, in a band of ± one standard deviation."


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
    """Figures of one run alone: arrivals, layers and similarities of each arm's first seed, and the data."""
    for names, arm in _grouped(_with_losses(run.arms), _same_arrivals):
        yield Drawn(
            f"arrivals-{arm.name}",
            f"Arrivals: {', '.join(names)}",
            f"Whose update arrived in which round, seed {arm.trials[0].seed}.",
            figures.arrivals(arm.status, arm.stood_in),
            run.name,
            tuple(f"arrivals-{name}" for name in names[1:]),
        )
    for names, arm in _grouped(run.arms, _same_layers):
        if arm.layers.names and len(arm.layers.rounds) > 1:
            dead = f" Dead: {', '.join(arm.layers.dead)}." if arm.layers.dead else ""
            yield Drawn(
                f"layers-{arm.name}",
                f"Layers: {', '.join(names)}",
                f"How much of each layer is kept, how much of it changes in a round, and for how many rounds a "
                f"weight stays, first layer on top, seed {arm.trials[0].seed}.{dead}",
                figures.layers(arm.layers),
                run.name,
                tuple(f"layers-{name}" for name in names[1:]),
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
    known = [(arm.name, arm.by_class) for arm in run.arms if arm.by_class is not None]
    if known and len({len(row) for _, row in known}) == 1:
        classes = len(known[0][1])
        labels = run.class_names if len(run.class_names) == classes else tuple(map(str, range(classes)))
        yield Drawn(
            "classes",
            "Accuracy by class",
            "Which classes each arm has learned: accuracy of each class in the last evaluations, mean over seeds.",
            figures.by_class([name for name, _ in known], labels, np.stack([row for _, row in known])),
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


def _with_losses(arms: Sequence[ArmData]) -> list[ArmData]:
    """Arms with missing updates; there is nothing to show for an arm in which all of them arrived."""
    whole = (ClientStatus.ARRIVED, ClientStatus.NOT_ASKED)
    return [arm for arm in arms if not np.isin(arm.status, whole).all()]


def _grouped(
    arms: Sequence[ArmData], same: Callable[[ArmData, ArmData], bool]
) -> list[tuple[list[str], ArmData]]:
    """Arms that would have the same figure share one: their names, and the first of them."""
    groups: list[tuple[list[str], ArmData]] = []
    for arm in arms:
        for names, other in groups:
            if same(arm, other):
                names.append(arm.name)
                break
        else:
            groups.append(([arm.name], arm))
    return groups


def _same_arrivals(one: ArmData, other: ArmData) -> bool:
    return np.array_equal(one.status, other.status) and np.array_equal(one.stood_in, other.stood_in)


def _same_layers(one: ArmData, other: ArmData) -> bool:
    pairs = ((getattr(one.layers, name), getattr(other.layers, name)) for name in ("density", "churn"))
    return all(np.array_equal(mine, theirs, equal_nan=True) for mine, theirs in pairs)


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"
