"""The figures of an experiment, from its results: seeds as bands, the colours and dashes of the rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from safari.report import figures
from safari.report.gather import Series
from safari.report.style import INK, End, colour, dash, label_ends, looks_of, new_figure, styled
from safari.stats import mean_interval
from safari.sweep import Case
from safari.sweep.numbers import Numbers
from safari.sweep.paired import paired
from safari.sweep.results import Results, column
from safari_evidence.blocks import Figure
from safari_evidence.experiments import Experiment

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of a label in a scatter, in pixels: two points that are closer than that would have names on each other.
_LABEL_WIDTH, _LABEL_HEIGHT = 90.0, 11.0

_CURVES = {
    "curves": ("top1", "Top-1", "top-1 accuracy (%)", True),
    "average": ("average_top1", "Top-1 of the running average", "top-1 accuracy (%)", True),
    "top5": ("top5", "Top-5", "top-5 accuracy (%)", True),
    "loss": ("loss", "Test loss", "test loss", False),
    "perplexity": ("perplexity", "Perplexity", "perplexity", False),
}


def figures_of(experiment: Experiment, results: Results) -> Iterator[Figure]:
    """Every figure that the experiment shows and that there are numbers for."""
    for show in experiment.show:
        if show in _CURVES:
            found = (figure for case in experiment.cases for figure in _curves(case, results, show))
        elif show in _OF_A_CASE:
            found = (figure for case in experiment.cases for figure in _OF_A_CASE[show](case, results))
        elif show == "sweep" and len(experiment.axes) == 1:
            found = (figure for figure in _sweep(experiment, results))
        elif show == "behind" and len(experiment.axes) == 2:
            found = (figure for figure in _behind(experiment, results))
        elif show == "bytes":
            found = (figure for figure in _bytes(experiment, results))
        else:
            continue
        for figure in found:
            yield dataclasses.replace(figure, name=f"{experiment.name}-{figure.name}")


def series_of(
    label: str, trials: Mapping[int, Numbers], seeds: int, table: str, name: str, pairs: bool = False
) -> Series | None:
    """A line with a row a seed, at the rounds that all of them have; None without any.

    `pairs`: two rounds in a row are one point, their mean at the later one.
    """
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
    values = np.array(rows)
    if pairs:
        rounds, values = _in_pairs(rounds, values)
    return Series(label, np.array(rounds, dtype=np.float64), values, seeds)


def _in_pairs(rounds: Sequence[int], values: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Columns of two rounds in a row become one, their mean, at the later round."""
    points: list[list[int]] = []
    for k, number in enumerate(rounds):
        if points and len(points[-1]) == 1 and rounds[points[-1][0]] == number - 1:
            points[-1].append(k)
        else:
            points.append([k])
    merged = np.stack([values[:, point].mean(axis=1) for point in points], axis=1)
    return [rounds[point[-1]] for point in points], merged


def looks(cases: Sequence[Case]) -> dict[str, int]:
    """The look of each arm of these cases, by its rule."""
    rules = {arm.name: arm.rule.name for case in cases for arm in case.config.arms}
    return dict(zip(rules, looks_of(list(rules.values())), strict=True))


def _lines(case: Case, results: Results, table: str, name: str) -> list[Series]:
    look = looks([case])
    pairs = table == "curve" and case.config.evaluation.pairs
    found = [
        series_of(arm.name, results.arm(case, arm), case.config.seeds, table, name, pairs)
        for arm in case.config.arms
    ]
    return [dataclasses.replace(line, look=look[line.label]) for line in found if line is not None]


def _curves(case: Case, results: Results, show: str) -> Iterator[Figure]:
    name, title, ylabel, percent = _CURVES[show]
    lines = _lines(case, results, "curve", name)
    if lines:
        yield Figure(
            f"{case.name}-{name.replace('_', '-')}",
            f"{title}: {case.name}",
            _over(lines),
            figures.curves(lines, ylabel, percent=percent),
        )


def _groups(case: Case, results: Results) -> Iterator[Figure]:
    lines = _lines(case, results, "groups", "share")
    if lines:
        yield Figure(
            f"{case.name}-right-group",
            f"Stand-in of the right group: {case.name}",
            "The share of missing clients whose first stand-in holds the same labels. " + _over(lines),
            figures.curves(lines, "of the right group (%)", percent=True),
        )


def _similarity(case: Case, results: Results) -> Iterator[Figure]:
    for arm in case.config.arms:
        trials = [t for t in results.arm(case, arm).items() if t[1].get("similarity")]
        if trials:
            seed, numbers = trials[0]
            matrix = np.array(
                [[np.nan if v is None else v for v in row] for row in numbers["similarity"]], dtype=np.float64
            )
            yield Figure(
                f"{case.name}-similarity-{arm.name}",
                f"Similarity at the end: {case.name}, {arm.name}",
                "Similarity between clients as the server estimates it, after the last round of seed "
                f"{seed}.",
                figures.similarity(matrix),
            )


def _diagnosis(case: Case, results: Results) -> Iterator[Figure]:
    words = {
        "error": "The round's error, against what a perfect network would have changed",
        "phi": "φ: stand-ins' updates against the true ones",
    }
    for name, title in words.items():
        lines = _lines(case, results, "diagnosis", name)
        if lines:
            yield Figure(
                f"{case.name}-{name}", f"{title}: {case.name}", _over(lines), figures.curves(lines, name)
            )


_OF_A_CASE = {"groups": _groups, "similarity": _similarity, "diagnosis": _diagnosis}


def _sweep(experiment: Experiment, results: Results) -> Iterator[Figure]:
    """Final top-1 of each arm over the values of the one axis."""
    ((axis, values),) = experiment.axes.items()
    arms = experiment.arms
    table = {arm: [_final(case, results, arm) for case in experiment.cases] for arm in arms}
    if not any(point is not None for points in table.values() for point in points):
        return
    with styled():
        figure = new_figure(6.0, 3.3)
        axes = figure.add_subplot()
        ends = []
        for arm, look in looks(experiment.cases).items():
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
    yield Figure("sweep", f"Final accuracy over {axis}", caption, figure)


def _behind(experiment: Experiment, results: Results) -> Iterator[Figure]:
    """Points behind a perfect network over the second axis, a panel for each value of the first; the share of right
    stand-ins below."""
    (_, panels), (axis, values) = experiment.axes.items()
    cases = {case.values: case for case in experiment.cases}
    averaged = all(case.config.aggregation.average for case in experiment.cases)
    name = f"average_{experiment.score}" if averaged else experiment.score
    look_of = looks(experiment.cases)
    with styled():
        figure = new_figure(7.6, 3.9)
        top, below = figure.subplots(
            2, len(panels), sharex=True, sharey="row", squeeze=False, height_ratios=[2.2, 1]
        )
        drawn = list[str]()
        for column, panel in enumerate(panels):
            arms = {
                (value, arm): trials
                for value in values
                for arm, trials in results.arms(cases[panel, value]).items()
            }
            for arm, look in look_of.items():
                style = {"color": colour(look), "ls": dash(look), "marker": "o", "ms": 3.5, "lw": 1.4}
                gaps = {
                    at: gap
                    for at, value in enumerate(values)
                    if arm != "perfect"
                    and (gap := paired(arms[value, "perfect"], arms.get((value, arm), {}), name)) is not None
                }
                if gaps:
                    # Arms stand beside each other, so that no interval hides another.
                    shift = 0.06 * (len(drawn) if arm not in drawn else drawn.index(arm))
                    drawn += [] if arm in drawn else [arm]
                    halves = [
                        0.0 if gap.interval is None else 50 * (gap.interval.high - gap.interval.low)
                        for gap in gaps.values()
                    ]
                    means = [100 * gap.mean for gap in gaps.values()]
                    places = [at + shift for at in gaps]
                    label = arm if column == 0 else None
                    top[column].errorbar(places, means, yerr=halves, elinewidth=1, label=label, **style)
                shares = {
                    at: 100 * fmean(known)
                    for at, value in enumerate(values)
                    if (known := right_groups(arms.get((value, arm), {})))
                }
                if shares:
                    below[column].plot(list(shares), list(shares.values()), **style)
            top[column].set_title(panel)
            top[column].axhline(0, color=INK, lw=1)
            below[column].set_xticks(range(len(values)), values)
        if not drawn:
            return
        top[0].set_ylabel("points behind perfect")
        below[0].set_ylabel("right stand-ins (%)")
        top[0].invert_yaxis()
        figure.supxlabel(axis, fontsize=9.0)
        for axes in (*top, *below):
            axes.grid(axis="y")
        figure.legend(loc="outside upper center", ncols=len(drawn))
    caption = (
        f"{'Running averages' if averaged else 'Newest models'}, mean difference seed by seed with its 95 % "
        "interval. Below: the share of missing clients whose first stand-in holds the same labels."
    )
    yield Figure("behind", f"Points behind a perfect network over {axis}", caption, figure)


def right_groups(trials: Mapping[int, Numbers]) -> list[float]:
    """The share of right stand-ins of the seeds that have one."""
    return [t["right_group"] for t in trials.values() if t.get("right_group") is not None]


def _bytes(experiment: Experiment, results: Results) -> Iterator[Figure]:
    """Final accuracy against all that clients sent, a dot for each case and arm."""
    from matplotlib.lines import Line2D

    averaged = all(case.config.aggregation.average for case in experiment.cases)
    name = "average_top1" if averaged else "top1"
    points = []
    for case in experiment.cases:
        for arm, trials in results.arms(case).items():
            whole = [t for t in trials.values() if t.get("megabytes_up") and t.get(name) is not None]
            if whole:
                points.append((case.name, arm, [t["megabytes_up"] for t in whole], [t[name] for t in whole]))
    if not points:
        return
    shown = {arm for _, arm, _, _ in points}
    look_of = {arm: look for arm, look in looks(experiment.cases).items() if arm in shown}
    with styled():
        figure = new_figure(7.6, 4.2)
        axes = figure.add_subplot()
        best: dict[str, tuple[float, float]] = {}
        for case_name, arm, sent, scores in points:
            at, mean, interval = fmean(sent), 100 * fmean(scores), mean_interval(scores)
            half = None if interval is None else 50 * (interval.high - interval.low)
            axes.errorbar(at, mean, yerr=half, color=colour(look_of[arm]), marker="o", ms=4, elinewidth=1)
            name_of = arm if len(experiment.cases) == 1 else case_name
            if name_of not in best or mean > best[name_of][1]:
                best[name_of] = (at, mean)
        axes.set_xscale("log")
        for which in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            which(lambda value, _: f"{value:,.0f}" if f"{value:e}"[0] in "125" else "")
        axes.set(xlabel="megabytes sent by all clients", ylabel="final top-1 accuracy (%)")
        if len(experiment.cases) > 1:
            axes.legend(
                handles=[
                    Line2D([], [], color=colour(look), marker="o", ls="", ms=4, label=arm)
                    for arm, look in look_of.items()
                ]
            )
        axes.grid(axis="y")
        axes.margins(x=0.12)
        _label_apart(axes, best)
    caption = (
        f"{'Running averages of the models' if averaged else 'Newest models'}, mean over the last rounds and "
        "seeds with its 95 % interval; all messages up, arrived or not."
    )
    yield Figure("bytes", "Accuracy against bytes", caption, figure)


def _label_apart(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Names beside their points, from the highest down; one that would lie on another goes below it."""
    axes.figure.canvas.draw()
    taken: list[tuple[float, float]] = []
    for name, point in sorted(points.items(), key=lambda item: -item[1][1]):
        x, y = axes.transData.transform(point)
        lower = y
        for other_x, other_y in taken:
            if abs(other_x - x) < _LABEL_WIDTH and other_y - lower < _LABEL_HEIGHT:
                lower = other_y - _LABEL_HEIGHT
        taken.append((x, lower))
        offset = (7, (lower - y) * 72 / axes.figure.dpi)
        axes.annotate(name, point, offset, textcoords="offset points", fontsize=6.5, va="center")


def _final(case: Case, results: Results, arm: str) -> tuple[float, float] | None:
    found = next((a for a in case.config.arms if a.name == arm), None)
    spread = column(results.arm(case, found), "top1") if found else {"mean": None}
    return None if spread["mean"] is None else (spread["mean"], spread["std"] or 0.0)


def _over(lines: Sequence[Series]) -> str:
    seeds = max(len(line.values) for line in lines)
    return f"Mean over {seeds} seeds, ± one standard deviation." if seeds > 1 else "One seed."
