"""Progress display of a sweep: one bar for all, a line for each process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from safari.sweep import Unit

# Without a terminal, seconds between two lines.
_SECONDS_BETWEEN_LINES = 10.0
# The pace of the first seconds says little: processes are still starting.
_SECONDS_TO_JUDGE = 5.0


class Board:
    """Progress on standard error, with the time left as estimated from the rounds so far."""

    def __init__(
        self,
        units: Sequence[Unit],
        quiet: bool = False,
        *,
        ended: Callable[[Unit], None] = lambda unit: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._when_ended = ended
        self._console = Console(stderr=True, quiet=quiet)
        self._live = self._console.is_terminal
        self._total = sum(unit.work for unit in units)
        self._count, self._ended = len(units), 0
        self._done: dict[str, float] = {}
        self._clock, self._last_line = clock, clock()
        # When the first rounds were reported, and how much was done then: loading and compiling are no rounds.
        self._began: tuple[float, float] | None = None
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._live,
        )
        self._all = self._bars.add_task("all", total=max(self._total, 1e-9), text="")
        self._lines: dict[int, TaskID] = {}

    def __enter__(self) -> Board:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, worker: int, unit: Unit) -> None:
        """Give the process' line to its new unit."""
        if worker not in self._lines:
            self._lines[worker] = self._bars.add_task("", total=1, text="")
        self._bars.reset(self._lines[worker], total=max(1, unit.rounds), description=unit.label, text="")

    def at(self, worker: int, unit: Unit, rounds: int, text: str) -> None:
        """Update the line of the process and the bar of all."""
        self._done[unit.label] = rounds * unit.weight
        self._began = self._began or (self._clock(), sum(self._done.values()))
        self._bars.update(self._lines[worker], completed=rounds, text=text)
        self._bars.update(self._all, completed=sum(self._done.values()), text=self._left())
        if self._clock() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._say(f"{unit.label}  {text}")

    def end(self, worker: int, unit: Unit, problem: str) -> None:
        """Count a unit, and show its problem if it failed."""
        self._ended += 1
        if problem:
            self._console.print(
                f"failed: {unit.label}: {problem.splitlines()[-1]}", markup=False, soft_wrap=True
            )
        else:
            self._say(unit.label)
        self._when_ended(unit)

    def _say(self, text: str) -> None:
        self._last_line = self._clock()
        if not self._live:
            share = sum(self._done.values()) / max(self._total, 1e-9)
            place = f"{self._ended}/{self._count} pieces  {share:4.0%}  {self._left()}"
            self._console.print(f"{place}  {text}", highlight=False, markup=False, soft_wrap=True)

    def _left(self) -> str:
        if self._began is None:
            return ""
        done = sum(self._done.values())
        seconds, more = self._clock() - self._began[0], done - self._began[1]
        if seconds < _SECONDS_TO_JUDGE or more <= 0:
            return ""
        return f"{spoken((self._total - done) * seconds / more)} left"


def spoken(seconds: float) -> str:
    """A duration in words.

    >>> spoken(42.4), spoken(600), spoken(7500)
    ('42 s', '10 min', '2 h 5 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
