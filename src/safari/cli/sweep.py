"""`safari sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from safari.cli.working import Asked, work, work_options
from safari.errors import ConfigError

if TYPE_CHECKING:
    from safari.sweep import Results, Sweep


@click.command(short_help="Run a config in many variants, and test which is better.")
@click.argument(
    "files",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
)
@work_options("runs/sweep")
def sweep(files: tuple[Path, ...], **options: Any) -> None:
    """Run all variants of a config that FILE describes, over all arms and seeds, and test which is better.

    \b
    FILE is a TOML file such as
      base = "my.toml"                # a config; without one, the demo's
      [set]                           # changes for all
      seeds = 5
      [axes]                          # all combinations of these values
      "pruning.sparsity" = [0.5, 0.8]
      "local.lr" = [0.002, 0.004]

    What is finished is never run twice, and what was interrupted goes on with the same command. Every case is an
    ordinary run folder below OUT; results.json has the numbers of all.

    \b
    Examples:
      safari sweep mine.toml --list
      safari sweep mine.toml --jobs 4
      safari sweep mine.toml --seeds 10 --only '0.8.*'
    """
    asked = Asked(**options)
    with asked.using():
        _sweep(files, asked)


def _sweep(files: Sequence[Path], asked: Asked) -> None:
    from safari.sweep import read

    found = read(files, asked.changes, quick=asked.quick)
    names = [sweep.name for sweep in found]
    wrong = [
        f"{file} has no [quick] table: run it without --quick" for file in files if file.stem not in names
    ]
    wrong += [
        f"FILE must have a name of its own, got {name!r} twice" for name in names if names.count(name) > 1
    ][:1]
    if wrong:
        raise ConfigError(wrong)
    work(found, asked, _Table())


class _Table:
    """A table, on standard output and as Markdown."""

    def words(self, sweep: Sweep) -> str:
        """Nothing: a sweep has a title."""
        return ""

    def write(self, sweeps: Sequence[Sweep], results: Results, out: Path) -> str:
        """Write the tables."""
        from safari.sweep.report import write

        return f"table: {', '.join(str(write(sweep, results, out)) for sweep in sweeps)}"

    def show(self, sweeps: Sequence[Sweep], results: Results, out: Path) -> None:
        """Print the tables."""
        from safari.sweep.report import text

        for sweep in sweeps:
            click.echo(text(sweep, results, out), nl=False)

    def as_json(self, sweep: Sweep, results: Results, out: Path) -> dict[str, Any]:
        """The rows of the table."""
        from safari.sweep.report import rows_of

        return {"rows": rows_of(sweep, results, out)}
