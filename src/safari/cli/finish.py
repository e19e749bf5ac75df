"""Common parts of `run`, `resume` and `show`: watchers, the message of a stop, the output at the end."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from safari.api import rule_lines
from safari.config import Config
from safari.engine import Watcher
from safari.errors import MissingExtraError
from safari.report import rows_of, to_rich, to_text, warnings_of, watchers_for, write_figures
from safari.report.gather import run_names
from safari.report.progress import Progress
from safari.runs import RunFolder, summarise
from safari.view import write_report

# Damaged lines that are named one by one.
MOST_NAMED = 20


def watchers(config: Config, quiet: bool) -> list[Watcher]:
    """The progress bars and the trackers that the config asks for."""
    return [Progress(quiet), *watchers_for(config)]


@contextlib.contextmanager
def stoppable(folder: Path) -> Iterator[None]:
    """Say how to go on when the user stops the run."""
    try:
        yield
    except KeyboardInterrupt:
        if (folder / "config.toml").exists():
            click.echo(
                f"stopped; nothing is lost: go on with: safari resume {shlex.quote(str(folder))}", err=True
            )
            raise SystemExit(130) from None
        raise


def finish(folder: Path, *, as_json: bool, quiet: bool, suggest: bool = False) -> None:
    """Write figures and report, and show the table; `suggest`: say what one types next."""
    run = RunFolder.open(folder)
    page = draw([run], folder)
    if as_json:
        click.echo(json.dumps(summary_of(run), indent=2))
        return
    print_table([run])
    if not quiet:
        click.echo(f"report: {page}", err=True)
        for line in next_commands(run) if suggest else ():
            click.echo(line, err=True)


def next_commands(run: RunFolder) -> list[str]:
    """Commands that continue from a finished run, as they are typed here."""
    here = Path(sys.argv[0])
    found = shutil.which("safari")
    safari = "safari" if found and Path(found).resolve() == here.resolve() else shlex.quote(str(here))
    place, arms = shlex.quote(str(run.path)), [arm.name for arm in run.config.arms]
    lines = [f"look at it in the browser:  {safari} view {place}"]
    if run.config.seeds == 1:
        lines.append(f"ask five seeds:             {safari} run {place}/config.toml --seeds 5 --jobs 2")
    elif len(arms) > 1:
        first = "drop" if "drop" in arms[:-1] else arms[0]
        pair = f"{place}:{first} :{arms[-1]}"
        lines.append(f"is a difference real?       {safari} compare {pair}")
    return lines


def draw(runs: Sequence[RunFolder], place: Path) -> Path:
    """Write the figures and report.html of a run, or of several overlaid; returns the page."""
    try:
        write_figures(runs, place / "figures")
    except MissingExtraError as error:
        click.echo(str(error), err=True)
    return write_report(runs, place / "report.html", rules=rule_lines(runs))


def summary_of(run: RunFolder) -> dict[str, Any]:
    """A run's summary; lines of its records that are damaged are left out and named on standard error."""
    skipped: list[str] = []
    summary = summarise(run, skipped)
    for problem in skipped[:MOST_NAMED]:
        click.echo(f"note: {run.path}: left out: {problem}", err=True)
    if len(skipped) > MOST_NAMED:
        click.echo(f"note: {run.path}: {len(skipped) - MOST_NAMED} more lines were left out", err=True)
    return summary


def print_table(runs: Sequence[RunFolder]) -> None:
    """The table on standard output, as wide as the terminal or whole where there is none, and below it what makes its
    numbers meaningless."""
    summaries = dict(zip(run_names(runs), map(summary_of, runs), strict=True))
    rows = rows_of(summaries)
    console = Console()
    if console.is_terminal:
        console.print(to_rich(rows, width=console.width))
    else:
        click.echo(to_text(rows), nl=False)
    for warning in warnings_of(summaries):
        click.echo(f"warning: {warning}")
