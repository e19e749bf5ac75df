"""Display of a running experiment in a notebook: a chart of the score, and the progress of each arm."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from html import escape

from safari.config import Evaluation
from safari.report.gather import arm_looks
from safari.report.progress import going_on_after, refusal_note
from safari.report.style import DASHES, PALETTE, thin
from safari.runs import RoundRecord, RunFolder, RunMetrics, Trial
from safari.runs.metrics import read_metrics
from safari.text import visible

# A browser draws a new picture in a blink, but each one is kept in the notebook's history of messages.
SECONDS = 0.5
MOST_POINTS = 200
MOST_NOTES = 20
WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 110, 10, 26

Points = dict[tuple[str, int], list[tuple[int, float]]]


# Puts HTML below the cell; returns what replaces it.
Show = Callable[[str], Callable[[str], None]]


class LiveChart:
    """A watcher for notebooks. It replaces what it shows at most twice a second.

    Args:
        show: puts HTML below the cell and returns a function that replaces it; IPython's by default.
        clock: seconds, to limit how often it draws.
    """

    def __init__(self, show: Show | None = None, clock: Callable[[], float] = time.monotonic):
        self._show, self._clock = show or _show_below_the_cell, clock
        self._replace: Callable[[str], None] | None = None
        self._points: Points = {}
        self._told: dict[tuple[str, int], tuple[int, str]] = {}
        self._notes: list[str] = []
        self._warned: set[str] = set()
        self._metrics: RunMetrics | None = None
        self._drawn = 0.0
        self._arms: dict[str, int] = {}
        self._rounds = 0
        self._evaluation = Evaluation()
        self._folder = ""

    def start(self, run: RunFolder) -> None:
        """Take the place below the cell."""
        self._arms = {arm: look for (_, arm), look in arm_looks([("", run.config)]).items()}
        self._rounds, self._folder = run.config.rounds, str(run.path)
        self._evaluation = run.config.evaluation
        done = {(trial.arm, trial.seed): trial.done() for trial in run.trials()}
        self._notes += going_on_after({place: n for place, n in done.items() if n < self._rounds})
        self._draw()

    def note(self, text: str) -> None:
        """Say something about the run, below the chart."""
        self._notes.append(f"note: {visible(text, 2000)}")
        self._draw()

    def round(self, trial: Trial, record: RoundRecord) -> None:
        """Add a round to the chart."""
        # The run's folder says what its task finds once the first round begins.
        self._metrics = self._metrics or read_metrics(trial.root)
        place = trial.arm, trial.seed
        if record.refused and trial.arm not in self._warned:
            self._warned.add(trial.arm)
            self._notes.append(f"note: {visible(refusal_note(trial, record), 2000)}")
        score = record.metrics.get(self._metrics.score)
        if score is not None:
            self._points.setdefault(place, []).append((record.round, float(score)))
        told = self._metrics.tell(record.metrics) or self._told.get(place, (0, ""))[1]
        self._told[place] = record.round, told
        if self._clock() - self._drawn >= SECONDS:
            self._draw()

    def stop(self) -> None:
        """Draw a last time."""
        self._draw()

    @property
    def _goal(self) -> float | None:
        return None if self._metrics is None else self._evaluation.goal(self._metrics.main.percent)

    def _draw(self) -> None:
        html = self._html()
        if self._replace is None:
            self._replace = self._show(html)
        else:
            self._replace(html)
        self._drawn = self._clock()

    def _html(self) -> str:
        rows = []
        for arm in self._arms:
            seeds = [seed for name, seed in self._told if name == arm]
            if seeds:
                done, told = self._told[arm, seeds[-1]]
                cells = (arm, f"seed {seeds[-1]}", f"round {done}/{self._rounds}", told)
                rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
        notes = "".join(f"<div>{escape(note)}</div>" for note in self._notes[:MOST_NOTES])
        if len(self._notes) > MOST_NOTES:
            notes += f"<div>and {len(self._notes) - MOST_NOTES} more notes</div>"
        picture = "" if self._metrics is None else chart(self._points, self._arms, self._metrics, self._goal)
        return f"<div>run folder: {escape(self._folder)}</div>{picture}<table>{''.join(rows)}</table>{notes}"


def chart(points: Points, arms: Mapping[str, int], metrics: RunMetrics, target: float | None = None) -> str:
    """The score against rounds as SVG, a line for each arm and seed; empty before there are two rounds to draw.

    Args:
        points: by arm and seed, rounds and scores.
        arms: their looks, in their order.
        metrics: those of the run; the score is drawn.
        target: a level that is marked where it lies between the scores; None: no level.
    """
    rounds = [round for line in points.values() for round, _ in line]
    if not rounds or min(rounds) == max(rounds):
        return ""
    factor = 100.0 if metrics.main.percent else 1.0
    values = [factor * value for line in points.values() for _, value in line]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 1, high + 1
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def across(round: int) -> float:
        return LEFT + (right - LEFT) * (round - min(rounds)) / (max(rounds) - min(rounds))

    def down(value: float) -> float:
        return bottom - (bottom - TOP) * (value - low) / (high - low)

    unit = "%" if metrics.main.percent else ""
    shapes = [
        _line([(LEFT, down(level)), (right, down(level))], "currentColor", 'opacity="0.2"')
        + _text(LEFT - 6, down(level) + 4, f"{level:.4g}{unit}", "end")
        for level in (low, (low + high) / 2, high)
    ]
    if target is not None and low < factor * target < high:
        level = down(factor * target)
        shapes.append(_line([(LEFT, level), (right, level)], "currentColor", 'stroke-dasharray="2 3"'))
    shapes.append(_text(LEFT, HEIGHT - 8, f"round {min(rounds)}", "start"))
    shapes.append(_text(right, HEIGHT - 8, str(max(rounds)), "end"))
    for k, (arm, look) in enumerate(arms.items()):
        colour = "currentColor" if look % len(PALETTE) == 0 else PALETTE[look % len(PALETTE)]
        dash = look // len(PALETTE) % len(DASHES)
        dashes = f'stroke-dasharray="{4 + 2 * dash} 3"' if dash else ""
        for (name, _), line in points.items():
            if name == arm:
                drawn = [line[i] for i in thin(len(line), MOST_POINTS)]
                places = [(across(round), down(factor * value)) for round, value in drawn]
                shapes.append(_line(places, colour, f'stroke-width="1.5" {dashes}'))
        shapes.append(_text(right + 8, TOP + 10 + 16 * k, arm, "start", colour))
    label = escape(f"{metrics.main.label} against rounds")
    height = max(HEIGHT, TOP + 16 * len(arms) + 10)
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'style="max-width:100%" font-family="sans-serif" font-size="11">{"".join(shapes)}</svg>'
    )


def in_notebook() -> bool:
    """Is this a Jupyter kernel? IPython's own terminal is none."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def show_figures() -> None:
    """Let a notebook show Matplotlib's figures also where pyplot, which sees to that, was never imported."""
    if not in_notebook():
        return
    from io import BytesIO

    from IPython import get_ipython
    from matplotlib.figure import Figure

    printer = get_ipython().display_formatter.formatters["image/png"]
    if Figure not in printer:

        def png(figure: Figure) -> bytes:
            data = BytesIO()
            figure.savefig(data, format="png", dpi=120, bbox_inches="tight")
            return data.getvalue()

        printer.for_type(Figure, png)


def _line(places: list[tuple[float, float]], colour: str, more: str = "") -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{points}" fill="none" stroke="{colour}" {more}/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "currentColor") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _show_below_the_cell(text: str) -> Callable[[str], None]:
    from IPython.display import HTML, display

    handle = display(HTML(text), display_id=True)
    return lambda newer: handle.update(HTML(newer))
