"""`safari compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import click

from safari.cli.offers import complete_run
from safari.cli.options import json_option
from safari.errors import ConfigError

Kind = Literal["png", "svg", "pdf"]
_KINDS: dict[str, Kind] = {".png": "png", ".svg": "svg", ".pdf": "pdf"}


@click.command(short_help="Test whether two runs, or two arms, really differ.")
@click.argument("a", metavar="A", shell_complete=complete_run)
@click.argument("b", metavar="B", shell_complete=complete_run)
@click.option(
    "--figure",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Draw the differences into this file, .png, .svg or .pdf.",
)
@json_option
def compare(a: str, b: str, figure: Path | None, as_json: bool) -> None:
    """Test whether A and B differ by more than chance: a paired test over their seeds.

    A and B are runs, or arms as RUN:ARM; for B, :ARM is an arm of the same run. Two runs are compared arm by arm.

    \b
    Examples:
      safari compare runs/mine:drop :safari
      safari compare runs/mine runs/other
      safari compare runs/mine:safari runs/other:safari --figure difference.pdf
    """
    from safari.report.style import render
    from safari.runs.files import write_atomically
    from safari.sweep.comparison import compare as compared

    if figure is not None and figure.suffix not in _KINDS:
        raise ConfigError(f"--figure must end in {', '.join(_KINDS)}, got {str(figure)!r}")
    found = compared(a, b)
    if figure is not None:
        write_atomically(figure, render(found.figure(), _KINDS[figure.suffix]))
    click.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
