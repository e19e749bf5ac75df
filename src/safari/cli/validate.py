"""`safari validate`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from safari.cli.options import json_option, read_table, set_option, trust_option, using_config, wrong_names
from safari.config import examine
from safari.errors import ConfigError


@click.command(short_help="Say everything that is wrong with a config.")
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False))
@set_option
@trust_option
@json_option
def validate(config: Path, settings: tuple[str, ...], trust: bool, as_json: bool) -> None:
    """Say everything that is wrong with a config, without running it.

    Reads the data set, imports your plug-ins and builds everything up to the first round. Exit code 0: the
    run would start; 2: it would not, and each line names the field, what is allowed and what was found.
    Notes say what would not stop the run but may not be meant: a layer that is cut whole, a sample that
    several clients hold, labels that begin at 1.
    """
    problems: list[str] = []
    notes: list[str] = []
    try:
        wanted, problems = examine(read_table(config, settings))
    except ConfigError as error:
        problems = error.problems
    else:
        from safari.engine import check_and_note

        with using_config(config, settings, trust):
            if problems:
                # Checks that depend on a wrong field are left out; a plug-in's name and options can be checked alone.
                problems += wrong_names(wanted)
            else:
                problems, notes = check_and_note(wanted)
    if as_json:
        found = {"config": str(config), "valid": not problems, "problems": problems, "notes": notes}
        click.echo(json.dumps(found))
    elif not problems:
        for note in notes:
            click.echo(f"note: {note}", err=True)
        click.echo(f"{config}: fine; {len(wanted.arms)} arms × {wanted.seeds} seeds × {wanted.rounds} rounds")
    if problems:
        if not as_json:
            raise ConfigError(problems)
        raise click.exceptions.Exit(2)
