"""One figure that is understood in five seconds: accuracy against rounds, names at the lines' ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safari.errors import RunError
from safari.evidence.book import column
from safari.evidence.pictures import series_of
from safari.report.figures import in_blocks
from safari.report.style import INK, PALETTE, SOFT, End, label_ends, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Look:
    """How an arm appears: its name for a reader who has never seen the arms' own, colour and width."""

    name: str
    colour: str
    width: float


# The order of the paper's story; the last is what the eye is to follow.
LOOKS = {
    "perfect": Look("perfect network", INK, 1.6),
    "drop": Look("dropping the missing", PALETTE[1], 1.6),
    "safari": Look("the paper's rule", PALETTE[6], 1.6),
    "safari+": Look("safari+", PALETTE[2], 2.8),
}


def headline(
    case: Mapping[str, Any], words: str, arms: Sequence[str] = tuple(LOOKS), score: str = "top1"
) -> Figure:
    """The figure from a case of `results.json`; `words` say what was done to the network, above it.

    Bands are ± one standard deviation over seeds; behind each name stands the arm's final accuracy. `score`:
    `top1`, or `average_top1` where a running average of the models was tested.
    """
    lines = []
    for arm in arms:
        entry = case["arms"].get(arm)
        if entry is None:
            raise RunError(f"the results have no arm {arm!r}; there are {', '.join(case['arms'])}")
        trials = {int(seed): numbers for seed, numbers in entry["seeds"].items()}
        line = series_of(arm, trials, len(trials), "curve", score)
        if line is None:
            raise RunError(f"the results of arm {arm!r} have no evaluations of {score}")
        lines.append((LOOKS.get(arm, Look(arm, SOFT, 1.6)), line, column(trials, score)["mean"]))
    with styled():
        figure = new_figure(7.6, 3.7)
        axes = figure.add_subplot()
        ends = []
        for look, line, final in lines:
            rounds, mean, std = in_blocks(line)
            axes.plot(rounds, 100 * mean, color=look.colour, lw=look.width, solid_capstyle="round")
            axes.fill_between(
                rounds, 100 * (mean - std), 100 * (mean + std), color=look.colour, alpha=0.15, linewidth=0
            )
            ends.append(End(f"{look.name}  {100 * final:.1f} %", 100 * float(mean[-1]), look.colour))
        axes.set_title(words, loc="left", fontsize=10.5)
        axes.set(xlabel="round", ylabel="test accuracy (%)")
        axes.grid(axis="y")
        axes.set_xlim(0, max(float(line.rounds[-1]) for _, line, _ in lines))
        # From the ten below the lowest: lines are compared with each other, not with nothing.
        axes.set_ylim(bottom=10 * (min(100 * line.mean.min() for _, line, _ in lines) // 10))
        label_ends(figure, axes, ends)
        return figure
