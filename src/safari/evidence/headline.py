"""The figure at the top of the README: how far behind a perfect network rules end, by kind of loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safari.errors import RunError
from safari.evidence.compare import paired
from safari.evidence.figures import looks_of
from safari.evidence.numbers import Numbers
from safari.report.style import GRID, INK, colour, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Row:
    """What was done to the network, in words, and the trials of each arm by seed."""

    name: str
    arms: Mapping[str, Mapping[int, Numbers]]


@dataclass(frozen=True)
class Look:
    """How an arm appears: its name for a reader who has never seen the arms' own, and the size of its dot."""

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


def headline(rows: Sequence[Row], words: str, arms: Sequence[str] = ARMS, against: str = "perfect") -> Figure:
    """A line for each kind of loss, a dot for each arm: its accuracy minus that of `against`, seed by seed.

    Bars are the 95 % intervals of that difference (Student's t).
    """
    looks = looks_of(arms)
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
