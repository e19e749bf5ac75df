"""`safari resume`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from safari.cli.offers import complete_run
from safari.cli.options import json_option, quiet_option, set_option, trust_option
from safari.errors import SafariError, TrustError
from safari.toml import parse_setting
from safari.trust import names_in, using

if TYPE_CHECKING:
    from safari.runs import RunFolder


@click.command()
@click.argument(
    "folder", metavar="RUN", type=click.Path(path_type=Path, file_okay=False), shell_complete=complete_run
)
@click.option(
    "--from",
    "from_round",
    type=click.IntRange(min=0),
    metavar="ROUND",
    help="Go back to the state after ROUND first; it must have a checkpoint (checkpoint.keep).",
)
@set_option
@trust_option
@json_option
@quiet_option
def resume(
    folder: Path,
    from_round: int | None,
    settings: tuple[str, ...],
    trust: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Go on with a run that was stopped or killed.

    The result is bit for bit what it would have been without the stop. A run that is finished is only shown.
    With --from, all arms and seeds go back to an earlier round; what came after it is kept in
    trials/ARM/seed-N/cut-1, cut-2 and so on.

    With --set rounds=300 a run becomes longer, with --set seeds=5 it gets more seeds; what its numbers follow from
    cannot change.

    A run that you have made goes on without more; one that names code or addresses and comes from somebody else, or
    has been edited since, needs --trust.

    \b
    Examples:
      safari resume runs/mine
      safari resume runs/mine --from 120
      safari resume runs/mine --set rounds=300
    """
    from safari import engine
    from safari.runs import RunFolder

    run = RunFolder.open(folder)
    if settings:
        changes = [parse_setting(text) for text in settings]
        with using(run.path / "config.toml", trust, names_in(changes)):
            _go_on(engine.changed(run, changes), from_round, trust, as_json=as_json, quiet=quiet)
    elif from_round is None and engine.finished(run):
        _show(run, trust, as_json=as_json, quiet=quiet)
    elif from_round is not None and run.is_federation:
        with run.writing():
            aside = run.rewind(from_round)
        for place in aside if not quiet else ():
            click.echo(f"back to round {from_round}; what came after it is in {place}", err=True)
        click.echo("start the federation again to go on from there", err=True)
    else:
        _go_on(run, from_round, trust, as_json=as_json, quiet=quiet)


def _go_on(run: RunFolder, from_round: int | None, trust: bool, *, as_json: bool, quiet: bool) -> None:
    from safari import engine
    from safari.cli.finish import finish, stoppable, watchers

    with using(run.path / "config.toml", trust), stoppable(run.path):
        engine.resume(run.path, watchers(run.config, quiet), from_round=from_round, trust=True)
    finish(run.path, as_json=as_json, quiet=quiet)


def _show(run: RunFolder, trust: bool, *, as_json: bool, quiet: bool) -> None:
    """A finished run: nothing is computed, and nothing that it names is loaded or contacted unasked."""
    from safari import engine
    from safari.cli.finish import finish, print_table, stoppable
    from safari.runs import summarise

    # A kill at the very end, or a change of config.toml, leaves results that are missing or old.
    summary = _read(run)
    report = run.path / "report.html"
    shown = summary is not None and report.is_file() and summary == summarise(run)
    with using(run.path / "config.toml", trust), stoppable(run.path):
        # Trackers may have missed something; bars have nothing to tell of a run that stands still.
        trackers = _trackers(run, quiet)
        if not shown or trackers:
            engine.resume(run.path, trackers)
    if not shown:
        finish(run.path, as_json=as_json, quiet=quiet)
    elif as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        print_table([run])
        if not quiet:
            count = len(run.trials())
            trials = "the only trial is" if count == 1 else f"all {count} trials are"
            click.echo(f"nothing to do: {trials} finished (report: {report})", err=True)


def _trackers(run: RunFolder, quiet: bool) -> list[Any]:
    from safari.report import watchers_for

    try:
        return [*watchers_for(run.config)]
    except TrustError as error:
        if not quiet:
            click.echo(f"no tracker is told: {error}", err=True)
        return []


def _read(run: RunFolder) -> Any:
    """Contents of summary.json; None where it is missing, empty or broken."""
    try:
        return run.read("summary.json") or None
    except SafariError:
        return None
