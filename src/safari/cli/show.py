"""`safari show`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from safari.cli.offers import complete_run
from safari.cli.options import json_option
from safari.errors import RunError


@click.command(short_help="Show runs again, or several laid over each other.")
@click.argument(
    "folders",
    metavar="RUN...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
    shell_complete=complete_run,
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where report.html and figures/ go.  [default: the run's folder; runs/overlay for several]",
)
@click.option(
    "--paper",
    is_flag=True,
    help="Also figures for a paper, in paper/: PDF, one column wide, two where they have several panels.",
)
@json_option
def show(folders: tuple[Path, ...], out: Path | None, paper: bool, as_json: bool) -> None:
    """Show runs again: the table, the figures and report.html; several runs are laid over each other.

    Works on runs that are still going, too.
    """
    from safari.cli.finish import draw, print_table, summary_of
    from safari.report import write_figures
    from safari.report.style import for_paper
    from safari.runs import RunFolder
    from safari.runs.files import making

    runs = [RunFolder.open(folder) for folder in folders]
    if as_json:
        click.echo(json.dumps({str(run.path): summary_of(run) for run in runs}, indent=2))
        return
    # First: somebody else's folder can be read and not written.
    print_table(runs)
    try:
        with making(out or (folders[0] if len(runs) == 1 else Path("runs/overlay"))) as place:
            page = draw(runs, place)
            if paper:
                with for_paper():
                    write_figures(runs, place / "paper", ("pdf",))
    except RunError as error:
        raise error if out else RunError(f"{error}; --out names another place for the report") from error
    click.echo(f"report: {page}", err=True)
    if paper:
        click.echo(f"figures for a paper: {place / 'paper'}", err=True)
