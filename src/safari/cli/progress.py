"""What a person sees while a run goes on: a bar an arm, with the current accuracy."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from safari.runs import RoundRecord, RunFolder, Trial


class Bars:
    """A watcher that draws on standard error: bars on a terminal, a line each tenth of the way elsewhere."""

    def __init__(self, quiet: bool = False):
        self._console = Console(stderr=True, quiet=quiet)
        self._live = self._console.is_terminal
        self._tasks: dict[str, TaskID] = {}
        self._rounds = 0
        self._warned: set[str] = set()
        self._progress = Progress(
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
        self._console.print(f"run folder: {run.path}", highlight=False)
        self._progress.start()

    def note(self, text: str) -> None:
        """Print a line about the run."""
        self._console.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)

    def round(self, trial: Trial, record: RoundRecord) -> None:
        """Move an arm's bar by a round."""
        task = self._tasks[trial.arm]
        if record.refused and trial.arm not in self._warned:
            self._warned.add(trial.arm)
            client, reason = next(iter(record.refused.items()))
            self.note(
                f"{trial.arm}, seed {trial.seed}, round {record.round}: {len(record.refused)} updates "
                f"were refused (client {client}: {reason}); said once an arm, the table counts all"
            )
        if record["top1"] is None:
            self._progress.advance(task)
            return
        score = f"top-1 {record['top1']:6.1%}  loss {_loss(record['loss'])}"
        self._progress.update(task, advance=1, score=score)
        tenth = max(1, self._rounds // 10)
        if not self._live and (record.round % tenth == 0 or record.round == self._rounds):
            place = f"{trial.arm}  seed {trial.seed}  round {record.round}/{self._rounds}"
            self._console.print(f"{place}  {score}", highlight=False)

    def stop(self) -> None:
        """Leave the bars as they are."""
        self._progress.stop()


def _loss(value: float | None) -> str:
    return "  inf" if value is None else f"{value:.3f}"
