"""`safari export`."""

from __future__ import annotations

from pathlib import Path

import click

from safari.cli.offers import complete_run


@click.command(short_help="Write a run's model as a file for other programs.")
@click.argument(
    "folder", metavar="RUN", type=click.Path(path_type=Path, file_okay=False), shell_complete=complete_run
)
@click.option("--arm", help="Whose model; may be left out where the run has one arm.")
@click.option("--seed", type=int, help="Of which seed.  [default: the first]")
@click.option("--average", is_flag=True, help="The running average of the models (aggregation.average).")
@click.option("--best", is_flag=True, help="The model with the best score (checkpoint.best).")
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "torchscript", "onnx"]),
    default="safetensors",
    show_default=True,
    help="What to write.",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Where.  [default: RUN/export]")
@click.option("--overwrite", is_flag=True, help="Replace an earlier export.")
def export(
    folder: Path,
    arm: str | None,
    seed: int | None,
    average: bool,
    best: bool,
    form: str,
    out: Path | None,
    overwrite: bool,
) -> None:
    """Write a run's model as one file, and a model card beside it.

    The model takes raw inputs (pixels from 0 to 1, columns as they were read): scaling is part of it.

    \b
    Examples:
      safari export runs/mine --arm safari --format onnx
      safari export runs/mine --arm recipe --average --out model
    """
    from safari.exports import export
    from safari.report.loaded import load

    picked = load(folder).pick(arm, seed, average=average, best=best)
    file = export(picked, out or folder / "export", form, overwrite=overwrite)
    click.echo(f"{file}; the card: {file.parent / 'README.md'}")
