"""The figures of an experiment, from the book: seeds as bands, one colour an arm throughout.

The arms of most experiments have the colours that a run of the demo gives them, wherever they stand here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from safari.evidence.book import Book, column
from safari.evidence.numbers import Numbers
from safari.evidence.plan import Case, Experiment
from safari.report import figures
from safari.report.gather import Series
from safari.report.style import End, colour, dash, label_ends, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """A figure with its words; `name` is that of its file."""

    name: str
    title: str
    caption: str
    figure: Figure


_LOOKS = {"perfect": 0, "drop": 1, "safari": 2, "safari+": 3}

_CURVES = {
    "curves": ("top1", "Top-1", "top-1 accuracy (%)", True),
    "average": ("average_top1", "Top-1 of the running average", "top-1 accuracy (%)", True),
    "top5": ("top5", "Top-5", "top-5 accuracy (%)", True),
    "loss": ("loss", "Test loss", "test loss", False),
}


def pictures(experiment: Experiment, book: Book) -> Iterator[Picture]:
    """Every figure that the experiment shows and that there are numbers for."""
    for show in experiment.show:
        if show in _CURVES:
            for case in experiment.cases:
                yield from _curves(case, book, show)
        elif show == "groups":
            for case in experiment.cases:
                yield from _groups(case, book)
        elif show == "similarity":
            for case in experiment.cases:
                yield from _similarity(case, book)
        elif show == "diagnosis":
            for case in experiment.cases:
                yield from _diagnosis(case, book)
        elif show == "sweep" and len(experiment.axes) == 1:
            yield from _sweep(experiment, book)


def series_of(label: str, trials: Mapping[int, Numbers], seeds: int, table: str, name: str) -> Series | None:
    """A line with a row a seed, at the rounds that all of them have; None without any."""
    found = [t[table] for t in trials.values() if name in (t.get(table) or {})]
    if not found:
        return None
    rounds = sorted(set.intersection(*(set(f["round"]) for f in found)))
    if not rounds:
        return None
    rows = []
    for f in found:
        at = dict(zip(f["round"], f[name], strict=True))
        rows.append([np.nan if at[r] is None else float(at[r]) for r in rounds])
    return Series(label, np.array(rounds, dtype=np.float64), np.array(rows), seeds)


def looks_of(arms: Sequence[str]) -> dict[str, int]:
    """Colour and dashes of each arm: known ones keep theirs, the others follow.

    >>> looks_of(["perfect", "mine", "safari+", "yours"])
    {'perfect': 0, 'mine': 4, 'safari+': 3, 'yours': 5}
    """
    others = itertools.count(len(_LOOKS))
    return {arm: _LOOKS[arm] if arm in _LOOKS else next(others) for arm in arms}


def _lines(case: Case, book: Book, table: str, name: str) -> list[Series]:
    looks = looks_of([arm.name for arm in case.config.arms])
    found = [
        series_of(arm.name, book.arm(case, arm), case.config.seeds, table, name) for arm in case.config.arms
    ]
    return [dataclasses.replace(line, look=looks[line.label]) for line in found if line is not None]


def _curves(case: Case, book: Book, show: str) -> Iterator[Picture]:
    name, title, ylabel, percent = _CURVES[show]
    lines = _lines(case, book, "curve", name)
    if lines:
        yield Picture(
            f"{case.name}-{name.replace('_', '-')}",
            f"{title}: {case.name}",
            _over(lines),
            figures.curves(lines, ylabel, percent=percent),
        )


def _groups(case: Case, book: Book) -> Iterator[Picture]:
    lines = _lines(case, book, "groups", "share")
    if lines:
        yield Picture(
            f"{case.name}-right-group",
            f"Stand-in of the right group: {case.name}",
            "The share of missing clients whose first stand-in holds the same labels. " + _over(lines),
            figures.curves(lines, "of the right group (%)", percent=True),
        )


def _similarity(case: Case, book: Book) -> Iterator[Picture]:
    for arm in case.config.arms:
        trials = [t for t in book.arm(case, arm).items() if t[1].get("similarity")]
        if trials:
            seed, numbers = trials[0]
            matrix = np.array(
                [[np.nan if v is None else v for v in row] for row in numbers["similarity"]], dtype=np.float64
            )
            yield Picture(
                f"{case.name}-similarity-{arm.name}",
                f"Similarity at the end: {case.name}, {arm.name}",
                f"What the server holds each pair of clients for after the last round of seed {seed}.",
                figures.similarity(matrix),
            )


def _diagnosis(case: Case, book: Book) -> Iterator[Picture]:
    words = {
        "error": "The round's error, against what a perfect network would have changed",
        "phi": "φ: stand-ins' updates against the true ones",
    }
    for name, title in words.items():
        lines = _lines(case, book, "diagnosis", name)
        if lines:
            yield Picture(
                f"{case.name}-{name}", f"{title}: {case.name}", _over(lines), figures.curves(lines, name)
            )


def _sweep(experiment: Experiment, book: Book) -> Iterator[Picture]:
    """Final top-1 of each arm over the values of the one axis."""
    ((axis, values),) = experiment.axes.items()
    arms = list(dict.fromkeys(arm.name for case in experiment.cases for arm in case.config.arms))
    table = {arm: [_final(case, book, arm) for case in experiment.cases] for arm in arms}
    if not any(point is not None for points in table.values() for point in points):
        return
    with styled():
        figure = new_figure(6.0, 3.3)
        axes = figure.add_subplot()
        ends = []
        for arm, look in looks_of(arms).items():
            known = [(i, point) for i, point in enumerate(table[arm]) if point is not None]
            if not known:
                continue
            at = np.array([i for i, _ in known], dtype=np.float64)
            mean, std = (100 * np.array([p[j] for _, p in known]) for j in (0, 1))
            axes.plot(at, mean, color=colour(look), ls=dash(look), lw=1.5, marker="o", ms=3.5)
            axes.fill_between(at, mean - std, mean + std, color=colour(look), alpha=0.16, linewidth=0)
            ends.append(End(arm, float(mean[-1]), colour(look)))
        axes.set_xticks(range(len(values)), values)
        axes.set(xlabel=axis, ylabel="final top-1 accuracy (%)")
        axes.grid(axis="y")
        axes.margins(x=0.02)
        label_ends(figure, axes, ends)
    caption = (
        "Mean over the evaluations of the last rounds, then over seeds; ± one standard deviation over seeds."
    )
    yield Picture("sweep", f"Final accuracy over {axis}", caption, figure)


def _final(case: Case, book: Book, arm: str) -> tuple[float, float] | None:
    found = next((a for a in case.config.arms if a.name == arm), None)
    spread = column(book.arm(case, found), "top1") if found else {"mean": None}
    return None if spread["mean"] is None else (spread["mean"], spread["std"] or 0.0)


def _over(lines: Sequence[Series]) -> str:
    seeds = max(len(line.values) for line in lines)
    return f"Mean over {seeds} seeds, ± one standard deviation." if seeds > 1 else "One seed."
