"""`safari init`."""

from __future__ import annotations

from pathlib import Path

import click

from safari.cli.options import read_config, set_option
from safari.errors import RunError
from safari.toml import to_toml


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default="safari.toml")
@set_option
def init(file: Path, settings: tuple[str, ...]) -> None:
    """Write a config to begin with: the demo's, every field with its explanation.

    \b
    Example:
      safari init mine.toml --set clients=20 --set pruning.pruner=snip
    """
    from safari.runs.files import write_atomically

    text = to_toml(read_config(None, settings), comments=True)
    if file.exists():
        raise RunError(f"{file} exists already; choose another name")
    write_atomically(file, text.encode())
    click.echo(f"wrote {file}; try: safari validate {file} && safari run {file}")
