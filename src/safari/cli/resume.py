"""`safari resume`."""

from __future__ import annotations

from pathlib import Path

import click

from safari.cli.options import json_option, quiet_option


@click.command()
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path, file_okay=False))
@json_option
@quiet_option
def resume(folder: Path, as_json: bool, quiet: bool) -> None:
    """Go on with a run that was stopped or killed.

    The result is bit for bit what it would have been without the stop. A run that is finished is only shown.
    """
    from safari import engine
    from safari.cli.finish import finish, stoppable, watchers
    from safari.runs import RunFolder

    config = RunFolder.open(folder).config
    with stoppable(folder):
        engine.resume(folder, watchers(config, quiet))
    finish(folder, as_json=as_json, quiet=quiet)
