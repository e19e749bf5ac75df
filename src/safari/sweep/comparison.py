"""Two runs, or two arms, compared over their seeds: what `safari compare` shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from safari.errors import RunError, one_of
from safari.report import Run
from safari.report.style import INK, SOFT, colour, looks_of, new_figure, styled
from safari.report.table import aligned, heading
from safari.runs import RunFolder, summarise
from safari.stats import Interval, holm, mean_interval, t_test, two_means
from safari.sweep.paired import ALPHA, spelled_p
from safari.sweep.plan import setting_of
from safari.tasks import Metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What has to be the same for a seed to mean the same in two runs: the data, their division, the losses' draws.
_WHAT_A_SEED_FIXES = ("data", "partition", "clients", "task")
_NOTHING = "–"


@dataclass(frozen=True)
class Difference:
    """The score of one arm minus that of another.

    `first` and `second` are their numbers by seed. With `paired` seeds the differences are tested (Student's t), and
    only seeds of both count; otherwise the two means are (Welch's t). `interval` is at 95 %. `effect` is the mean
    difference in standard deviations of the differences, or of the numbers where they are not paired. `adjusted` is
    `p` after Holm's correction over all rows; `look` is that of `one` in figures. What cannot be said of a single seed
    is None.
    """

    one: str
    other: str
    metric: str
    higher_is_better: bool
    first: Mapping[int, float]
    second: Mapping[int, float]
    paired: bool
    mean: float
    interval: Interval | None
    effect: float | None
    p: float | None
    adjusted: float | None = None
    look: int = 0


@dataclass(frozen=True)
class Comparison:
    """Rows of differences; `notes` say what else differs between the two."""

    rows: tuple[Difference, ...]
    metric: Metric
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"rows": [asdict(row) for row in self.rows], "notes": list(self.notes)}

    def __str__(self) -> str:
        header = ["", "metric", "difference", "95 % interval", "effect", "p", "seeds"]
        points = " points" if self.metric.percent else ""
        body = [
            [
                f"{row.one} minus {row.other}",
                row.metric,
                f"{self._scaled(row.mean):+.{self._digits}f}{points}",
                _NOTHING
                if row.interval is None
                else f"{self._scaled(row.interval.low):+.{self._digits}f} to "
                f"{self._scaled(row.interval.high):+.{self._digits}f}",
                _NOTHING if row.effect is None else f"{row.effect:+.2f}",
                _NOTHING if row.adjusted is None else spelled_p(row.adjusted),
                str(len(row.first)) if row.paired else f"{len(row.first)} and {len(row.second)}",
            ]
            for row in self.rows
        ]
        lines = [aligned(header, body).rstrip(), *map(self._words, self.rows), *self.notes]
        return "\n".join(lines)

    def figure(self) -> Figure:
        """A line for each row: the difference of each seed, their mean and its interval; needs the extra `plots`."""
        with styled():
            figure = new_figure(6.0, 1.1 + 0.34 * len(self.rows))
            axes = figure.add_subplot()
            axes.axvline(0, color=INK, lw=1.0)
            for at, row in enumerate(self.rows):
                hue = colour(row.look)
                if row.paired:
                    gaps = [self._scaled(row.first[seed] - row.second[seed]) for seed in row.first]
                    axes.plot(gaps, [at] * len(gaps), ls="", marker="|", ms=9, color=SOFT, alpha=0.7)
                if row.interval is not None:
                    ends = [self._scaled(row.interval.low), self._scaled(row.interval.high)]
                    axes.plot(ends, [at, at], color=hue, lw=2)
                axes.plot(self._scaled(row.mean), at, marker="o", color=hue, ms=6)
            several = len({row.metric for row in self.rows}) > 1
            names = [f"{row.one} − {row.other}" + (f"\n{row.metric}" if several else "") for row in self.rows]
            axes.set_yticks(range(len(self.rows)), names)
            axes.invert_yaxis()
            axes.margins(y=0.5 / len(self.rows))
            axes.tick_params(axis="y", length=0)
            axes.spines["left"].set_visible(False)
            unit = "points of " if self.metric.percent else "difference in "
            axes.set_xlabel(f"{unit}{self.metric.label}")
            axes.grid(axis="x")
            return figure

    @property
    def _digits(self) -> int:
        return 2 if self.metric.percent else 4

    def _scaled(self, value: float) -> float:
        return 100 * value if self.metric.percent else value

    def _words(self, row: Difference) -> str:
        """The row as a sentence."""
        if row.adjusted is None:
            return f"{row.one}, {row.other}, {row.metric}: one seed has no test; run more with --seeds"
        if row.adjusted > ALPHA:
            return f"{row.one}, {row.other}, {row.metric}: no difference is shown at {100 * ALPHA:g} %"
        better = (row.mean > 0) == row.higher_is_better
        ahead, behind = (row.one, row.other) if better else (row.other, row.one)
        return f"{ahead} is ahead of {behind} in {row.metric} (p {spelled_p(row.adjusted)})"


@dataclass(frozen=True)
class _Side:
    """Arms of a run, each with its finished seeds."""

    run: RunFolder
    arms: Mapping[str, Mapping[int, Mapping[str, Any]]]

    @property
    def looks(self) -> dict[str, int]:
        """The look of each arm in figures."""
        arms = self.run.config.arms
        return dict(zip((arm.name for arm in arms), looks_of([arm.rule.name for arm in arms]), strict=True))

    def name(self, arm: str, alone: bool) -> str:
        return arm if alone else f"{self.run.path.name}:{arm}"


def compare(a: str | Path | Run, b: str | Path | Run) -> Comparison:
    """Test whether the difference between two runs, or two arms, is more than chance.

    A run is its folder, an arm of it `FOLDER:ARM`; for `b`, `:ARM` is an arm of the run of `a`. Two whole runs are
    compared arm by arm. Where the runs have the same data, division and clients, a seed gives both the same start and
    the same losses of the network, and the test is of the differences seed by seed. Needs the extra `stats`.

    Args:
        a: the first run, or arm.
        b: the one that it is compared with.
    """
    one = _side(a)
    other = _side(b, one.run)
    metrics = one.run.metrics
    if metrics.main != other.run.metrics.main:
        raise RunError(
            f"{one.run.path} is judged by {metrics.score}, {other.run.path} by {other.run.metrics.score}: "
            "they have no score in common"
        )
    pairs = _pairs(one, other)
    unlike = [
        name
        for name in _WHAT_A_SEED_FIXES
        if setting_of(one.run.config, name) != setting_of(other.run.config, name)
    ]
    alone = one.run.path == other.run.path
    rows = [
        row
        for first, second in pairs
        for column in (metrics.score, f"average_{metrics.score}")
        if (row := _difference(one, first, other, second, column, metrics.main, alone, not unlike))
        is not None
    ]
    if not rows:
        raise RunError(f"{a} and {b} have no finished seed{' in common' if not unlike else ''}")
    return Comparison(tuple(_adjusted(rows)), metrics.main, tuple(_notes(one, other, unlike)))


def _side(given: str | Path | Run, before: RunFolder | None = None) -> _Side:
    """The side of a comparison that `given` names; `:ARM` is an arm of the run `before`."""
    if isinstance(given, Run):
        return _finished(given.folder, None)
    if Path(given).exists():
        return _finished(RunFolder.open(Path(given)), None)
    path, colon, arm = str(given).rpartition(":")
    if colon and not path and before is not None:
        return _finished(before, arm)
    return _finished(RunFolder.open(Path(path if colon else given)), arm if colon else None)


def _finished(run: RunFolder, arm: str | None) -> _Side:
    summary = summarise(run)
    if arm is not None and arm not in summary["arms"]:
        raise RunError(one_of(f"the arm of {run.path}", arm, summary["arms"]))
    names = [arm] if arm is not None else list(summary["arms"])
    return _Side(
        run,
        {
            name: {
                int(seed): numbers
                for seed, numbers in summary["arms"][name]["seeds"].items()
                if numbers["finished"]
            }
            for name in names
        },
    )


def _pairs(one: _Side, other: _Side) -> list[tuple[str, str]]:
    """Pairs of arms to compare: single ones with each other, otherwise those of one name."""
    if len(one.arms) == len(other.arms) == 1:
        pairs = [(next(iter(one.arms)), next(iter(other.arms)))]
    else:
        pairs = [(name, name) for name in one.arms if name in other.arms]
    if not pairs:
        raise RunError(
            f"{one.run.path} has {', '.join(one.arms)} and {other.run.path} {', '.join(other.arms)}: no arm in "
            "common; name them as RUN:ARM"
        )
    if one.run.path == other.run.path and any(first == second for first, second in pairs):
        raise RunError(
            f"{one.run.path} is compared with itself; name two of its arms as RUN:ARM and :ARM, of "
            f"{', '.join(arm.name for arm in one.run.config.arms)}"
        )
    return pairs


def _difference(
    one: _Side,
    first: str,
    other: _Side,
    second: str,
    column: str,
    metric: Metric,
    alone: bool,
    paired: bool,
) -> Difference | None:
    """Difference of two arms in a column; None where one has no numbers."""
    left = {s: n[column] for s, n in one.arms[first].items() if n.get(column) is not None}
    right = {s: n[column] for s, n in other.arms[second].items() if n.get(column) is not None}
    if paired:
        left, right = ({s: side[s] for s in left if s in right} for side in (dict(left), dict(right)))
    if not left or not right:
        return None
    title = heading(metric)
    if column.startswith("average_"):
        title += " of the average"
    if paired:
        gaps = [left[seed] - right[seed] for seed in left]
        mean, interval, p = fmean(gaps), mean_interval(gaps, 1 - ALPHA), t_test(gaps)
        effect = _effect(mean, gaps)
    else:
        mean = fmean(left.values()) - fmean(right.values())
        interval, p = two_means(list(left.values()), list(right.values()), 1 - ALPHA)
        within = [x - fmean(side.values()) for side in (left, right) for x in side.values()]
        effect = _effect(mean, within)
    return Difference(
        one.name(first, alone), other.name(second, alone), title, metric.higher, left, right, paired,
        mean, interval, effect, p, look=one.looks[first],
    )  # fmt: skip


def _effect(mean: float, values: Sequence[float]) -> float | None:
    spread = stdev(values) if len(values) > 1 else 0.0
    return mean / spread if spread > 0 else None


def _adjusted(rows: Sequence[Difference]) -> Iterator[Difference]:
    """Holm's correction over the rows that have a test."""
    known = iter(holm([row.p for row in rows if row.p is not None]))
    for row in rows:
        yield row if row.p is None else replace(row, adjusted=next(known))


def _notes(one: _Side, other: _Side, unlike: Sequence[str]) -> Iterator[str]:
    if unlike:
        yield (
            f"The runs differ in {', '.join(unlike)}, so that a seed does not give both the same: the means are "
            "tested, not the differences seed by seed."
        )
    rounds = (one.run.config.rounds, other.run.config.rounds)
    if rounds[0] != rounds[1]:
        yield f"The runs have {rounds[0]} and {rounds[1]} rounds."
