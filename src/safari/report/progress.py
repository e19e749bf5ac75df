"""Progress display of a run in a terminal: a bar for each arm, with the newest score."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from safari.runs import RoundRecord, RunFolder, RunMetrics, Trial
from safari.runs.metrics import read_metrics
from safari.text import visible


class Progress:
    """A watcher that draws on standard error: bars on a terminal, a line each tenth of the way elsewhere.

    Notebooks have `safari.report.live`.
    """

    def __init__(self, quiet: bool = False, console: Console | None = None):
        self._console = console or Console(stderr=True, quiet=quiet)
        self._live = self._console.is_terminal
        self._tasks: dict[str, TaskID] = {}
        self._rounds = 0
        self._done: dict[tuple[str, int], int] = {}
        self._warned: set[str] = set()
        self._metrics: RunMetrics | None = None
        self._progress = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[score]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._live,
        )

    def start(self, run: RunFolder) -> None:
        """Make a bar for each arm."""
        self._rounds = run.config.rounds
        width = max(len(arm.name) for arm in run.config.arms)
        for arm in run.config.arms:
            self._tasks[arm.name] = self._progress.add_task(
                arm.name.ljust(width), total=self._rounds * run.config.seeds, score=""
            )
        self._console.print(f"run folder: {run.path}", highlight=False, markup=False, soft_wrap=True)
        self._done = {(trial.arm, trial.seed): trial.done() for trial in run.trials()}
        unfinished = {place: done for place, done in self._done.items() if done < self._rounds}
        for text in going_on_after(unfinished):
            self._console.print(text, highlight=False, markup=False)
        self._progress.start()

    def note(self, text: str) -> None:
        """Print a line about the run."""
        self._console.print(f"note: {visible(text, 2000)}", highlight=False, markup=False, soft_wrap=True)

    def round(self, trial: Trial, record: RoundRecord) -> None:
        """Move an arm's bar by a round."""
        task = self._tasks[trial.arm]
        if record.refused and trial.arm not in self._warned:
            self._warned.add(trial.arm)
            self.note(refusal_note(trial, record))
        # Not at the start: the run's folder says what its task finds once the first round begins.
        self._metrics = self._metrics or read_metrics(trial.root)
        score = self._metrics.tell(record.metrics)
        if not score:
            self._progress.advance(task)
            return
        self._progress.update(task, advance=1, score=score)
        tenth = max(1, self._rounds // 10)
        is_new = record.round > self._done.get((trial.arm, trial.seed), 0)
        if is_new and not self._live and (record.round % tenth == 0 or record.round == self._rounds):
            place = f"{trial.arm}  seed {trial.seed}  round {record.round}/{self._rounds}"
            self._console.print(f"{place}  {score}", highlight=False, markup=False)

    def stop(self) -> None:
        """Leave the bars as they are."""
        self._progress.stop()


def refusal_note(trial: Trial, record: RoundRecord) -> str:
    """A note on the first round in which updates of an arm were refused."""
    client, reason = next(iter(record.refused.items()))
    return (
        f"{trial.arm}, seed {trial.seed}, round {record.round}: {len(record.refused)} updates "
        f"were refused (client {client}: {reason}); said once an arm, the table counts all"
    )


def going_on_after(done: Mapping[tuple[str, int], int]) -> list[str]:
    """Lines with the round after which a resumed run continues, by arm and seed; one line where all agree.

    >>> going_on_after({("drop", 0): 6, ("safari", 0): 6}), going_on_after({})
    (['going on after round 6'], [])
    >>> going_on_after({("drop", 0): 10, ("safari", 0): 5, ("drop", 1): 0})
    ['drop  seed 0  going on after round 10', 'safari  seed 0  going on after round 5']
    """
    rounds = set(done.values())
    if len(rounds) == 1:
        return [f"going on after round {number}" for number in rounds if number]
    return [
        f"{arm}  seed {seed}  going on after round {number}" for (arm, seed), number in done.items() if number
    ]
