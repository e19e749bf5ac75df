"""`safari init`."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from safari.cli.options import read_config, set_option
from safari.errors import RunError
from safari.toml import to_toml


@click.command(short_help="Write a config to begin with, every field explained.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default="safari.toml")
@set_option
def init(file: Path, settings: tuple[str, ...]) -> None:
    """Write a config to begin with: the demo's, every field with its explanation. FILE -: to the output.

    \b
    Example:
      safari init mine.toml --set clients=20 --set pruning.pruner=snip
    """
    text = to_toml(read_config(None, settings), comments=True)
    if str(file) == "-":
        click.echo(text, nl=False)
        return
    try:
        with file.open("x", encoding="utf-8") as handle:
            handle.write(text)
    except FileExistsError as error:
        raise RunError(f"{file} exists already; choose another name") from error
    except OSError as error:
        # Half a config would be worse than none.
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        raise RunError(f"cannot write {file}: {error.strerror or error}") from error
    click.echo(f"wrote {file}; try: safari validate {file} && safari run {file}")
