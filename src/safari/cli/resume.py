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
@json_option
@quiet_option
def resume(folder: Path, as_json: bool, quiet: bool) -> None:
    """Go on with a run that was stopped or killed.

    The result is bit for bit what it would have been without the stop. A run that is finished is only shown.
    """
    from safari import engine
    from safari.cli.finish import finish, print_table, stoppable, watchers
    from safari.runs import RunFolder, summarise

    run = RunFolder.open(folder)
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
