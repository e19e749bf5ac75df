"""The figures of the README: accuracy against what was sent, and how far behind a perfect network rules end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safari.errors import RunError
from safari.report.style import GRID, INK, SOFT, colour, looks_of, new_figure, styled
from safari.sweep.numbers import Numbers
from safari.sweep.paired import paired
from safari_evidence.figures import series_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Row:
    """A network condition, in words, and the trials of each arm by seed."""

    name: str
    arms: Mapping[str, Mapping[int, Numbers]]


@dataclass(frozen=True)
class Look:
    """Appearance of an arm: a name for readers who do not know the arms' own, and the size of its dot."""

    name: str
    size: float = 6.0


# The last is drawn on top.
LOOKS = {
    "drop": Look("the missing are dropped"),
    "fedau": Look("FedAU"),
    "safari": Look("the paper's rule"),
    "mifa": Look("MIFA"),
    "safari+": Look("safari+", 9.0),
}

ARMS = tuple(LOOKS)

# Vertical distance between the dots of one line, which would otherwise hide each other.
_APART = 0.15


@dataclass(frozen=True)
class Line:
    """An arm of a race: its name in words, its colour, and where the name stands, in points from the line's end."""

    name: str
    look: int
    trials: Mapping[int, Numbers]
    offset: tuple[float, float]
    align: str


def race(lines: Sequence[Line], words: str, goal: str) -> Figure:
    """Accuracy against the megabytes that all clients have sent: mean over seeds, ± one standard deviation.

    A dotted line marks where the first line ends; `goal` says what that is. Two evaluations in a row are one point.
    """
    with styled():
        figure = new_figure(7.6, 4.2)
        axes = figure.add_subplot()
        for k, line in enumerate(lines):
            seeds = len(line.trials)
            scores = series_of(line.name, line.trials, seeds, "curve", "top1", pairs=True)
            sent = series_of(line.name, line.trials, seeds, "curve", "megabytes_up", pairs=True)
            if scores is None or sent is None:
                raise RunError(
                    f"the results have no finished trial of {line.name!r} with its accuracies and bytes"
                )
            at, mean, std = sent.mean, 100 * scores.mean, 100 * scores.std
            hue = colour(line.look)
            axes.plot(at, mean, color=hue, lw=1.6, zorder=3 + k)
            axes.fill_between(at, mean - std, mean + std, color=hue, alpha=0.16, linewidth=0)
            axes.plot(at[-1], mean[-1], color=hue, marker="o", ms=5, zorder=3 + k)
            axes.annotate(
                line.name, (at[-1], mean[-1]), line.offset, textcoords="offset points", ha=line.align, va="center",
                color=hue, fontsize=8.5, fontweight="bold",
            )  # fmt: skip
            if k == 0:
                axes.axhline(mean[-1], color=SOFT, lw=0.9, ls=(0, (1.5, 2)), zorder=2)
                axes.annotate(goal, (0.01, mean[-1]), (0, 5), xycoords=("axes fraction", "data"),
                              textcoords="offset points", color=SOFT, fontsize=8)  # fmt: skip
        axes.set_xscale("log")
        for which in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            which(lambda value, _: f"{value:,.0f}" if f"{value:e}"[0] in "125" else "")
        axes.grid(axis="y")
        figure.suptitle(words, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        axes.set(xlabel="megabytes sent by all clients, arrived or not", ylabel="test accuracy (%)")
        return figure


def behind(rows: Sequence[Row], words: str, arms: Sequence[str] = ARMS, against: str = "perfect") -> Figure:
    """A line for each kind of loss, a dot for each arm: its accuracy minus that of `against`, seed by seed.

    Bars are the 95 % intervals of that difference (Student's t).
    """
    looks = dict(zip(arms, looks_of(arms), strict=True))
    with styled():
        figure = new_figure(7.6, 0.9 + 0.36 * len(rows))
        axes = figure.add_subplot()
        for at, row in enumerate(rows):
            for arm in arms:
                look = LOOKS.get(arm, Look(arm))
                missing = [name for name in (arm, against) if not row.arms.get(name)]
                found = None if missing else paired(row.arms[arm], row.arms[against], "top1")
                if found is None:
                    who = missing[0] if missing else f"{arm} and {against} with the same seed"
                    raise RunError(f"the results for {row.name!r} have no finished trial of {who}")
                interval = found.interval
                half = None if interval is None else 50 * (interval.high - interval.low)
                axes.errorbar(
                    100 * found.mean,
                    at + _APART * (arms.index(arm) - (len(arms) - 1) / 2),
                    xerr=half,
                    color=colour(looks[arm]),
                    marker="o",
                    markersize=look.size,
                    elinewidth=1.2,
                    linestyle="none",
                    label=look.name if at == 0 else None,
                    zorder=3 + arms.index(arm),
                )
        axes.axvline(0, color=INK, lw=1.2)
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.invert_yaxis()
        axes.hlines(range(len(rows)), *axes.get_xlim(), color=GRID, lw=0.8, zorder=0)
        axes.margins(x=0.02)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        figure.suptitle(words, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        axes.set_xlabel("points of test accuracy behind a perfect network")
        axes.xaxis.set_major_formatter(lambda x, _: f"{0 - x:g}")
        axes.legend(
            loc="lower right", bbox_to_anchor=(1, 1), ncols=len(arms), frameon=False, borderaxespad=0.2,
            handletextpad=0.1, columnspacing=1.2,
        )  # fmt: skip
        return figure
