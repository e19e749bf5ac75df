"""What `run` and `resume` have in common: who watches, what a stop says, what is shown at the end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console

from safari.cli.progress import Bars
from safari.config import Config
from safari.engine import Watcher
from safari.errors import MissingExtraError
from safari.report import rich_table, summary_rows, watchers_for, write_figures, write_report
from safari.runs import RunFolder, summarise


def watchers(config: Config, quiet: bool) -> list[Watcher]:
    """The progress bars and the trackers that the config asks for."""
    return [Bars(quiet), *watchers_for(config)]


@contextlib.contextmanager
def stoppable(folder: Path) -> Iterator[None]:
    """Say how to go on when the user stops the run."""
    try:
        yield
    except KeyboardInterrupt:
        if (folder / "config.toml").exists():
            click.echo(f"stopped; nothing is lost: go on with 'safari resume {folder}'", err=True)
            raise SystemExit(130) from None
        raise


def finish(folder: Path, *, as_json: bool, quiet: bool) -> None:
    """Write figures and report, and show the table."""
    run = RunFolder.open(folder)
    try:
        write_figures(run, folder / "figures")
    except MissingExtraError as error:
        click.echo(str(error), err=True)
    page = write_report([run], folder / "report.html")
    if as_json:
        click.echo(json.dumps(summarise(run), indent=2))
        return
    Console().print(rich_table(summary_rows([run])))
    if not quiet:
        click.echo(f"report: {page}", err=True)
