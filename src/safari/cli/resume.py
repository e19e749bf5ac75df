"""`safari resume`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from safari.cli.options import json_option, quiet_option
from safari.config import Track


@click.command()
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--from",
    "from_round",
    type=click.IntRange(min=0),
    metavar="ROUND",
    help="Go back to the state after ROUND first; it must have a checkpoint (checkpoint.keep).",
)
@json_option
@quiet_option
def resume(folder: Path, from_round: int | None, as_json: bool, quiet: bool) -> None:
    """Go on with a run that was stopped or killed.

    The result is bit for bit what it would have been without the stop. A run that is finished is only shown.
    With --from, all arms and seeds go back to an earlier round; what came after it is kept in
    trials/ARM/seed-N/cut-1, cut-2 and so on.

    \b
    Examples:
      safari resume runs/mine
      safari resume runs/mine --from 120
    """
    from safari import engine
    from safari.cli.finish import finish, print_table, stoppable, watchers
    from safari.runs import RunFolder, summarise

    run = RunFolder.open(folder)
    if from_round is not None:
        with run.writing():
            aside = run.rewind(from_round)
        if not quiet:
            for place in aside:
                click.echo(f"back to round {from_round}; what came after it is in {place}", err=True)
    whole = engine.finished(run)
    # A kill at the very end, or a change of config.toml, leaves results that are missing or old.
    summary = _read(folder / "summary.json") if whole else None
    report = folder / "report.html"
    shown = summary is not None and report.is_file() and summary == summarise(run)
    if not shown or run.config.track != Track():
        with stoppable(folder):
            # Trackers may have missed something; bars have nothing to tell of a run that stands still.
            engine.resume(folder, watchers(run.config, quiet or whole))
    if not shown:
        finish(folder, as_json=as_json, quiet=quiet)
    elif as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        print_table([run])
        if not quiet:
            count = len(run.trials())
            trials = "the only trial is" if count == 1 else f"all {count} trials are"
            click.echo(f"nothing to do: {trials} finished (report: {report})", err=True)


def _read(path: Path) -> Any:
    """What a JSON file holds; None where it is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
