"""`safari run`."""

from __future__ import annotations

from pathlib import Path

import click

from safari.cli.options import (
    json_option,
    quiet_option,
    read_config,
    set_option,
    trust_option,
    using_config,
)
from safari.config import Config
from safari.errors import ConfigError, RunError


@click.command(short_help="Run an experiment: every arm and seed, then a report.")
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False), required=False)
@click.option(
    "--preset",
    "presets",
    metavar="NAME",
    multiple=True,
    help="Settings that belong together: demo (the defaults), paper (the paper's own), or best: the recipe for "
    "the best model over bad links. They come before --set.",
)
@set_option
@click.option("--seeds", type=click.IntRange(min=1), help="How many seeds to run.  [default: the config's]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The run's folder, new or empty.  [default: runs/NAME-DATE-TIME]",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes, each with a seed at a time, which share the cores and the GPU.",
)
@click.option("--overwrite", is_flag=True, help="Replace the run that the folder holds.")
@trust_option
@json_option
@quiet_option
def run(
    config: Path | None,
    presets: tuple[str, ...],
    settings: tuple[str, ...],
    seeds: int | None,
    out: Path | None,
    jobs: int,
    overwrite: bool,
    trust: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run an experiment: every arm and seed, then a table, figures and report.html.

    Without CONFIG it is the demo: the embedded digits, 10 clients in two groups of five labels, 70% of most
    clients' updates lost, 80% of the weights cut by magnitude, and four arms side by side: a perfect
    network, dropping the missing, SAFARI, and our own SAFARI+.

    \b
    Examples:
      safari run
      safari run --seeds 5 --set pruning.pruner=synflow
      safari run my.toml --preset best
      safari run --set uplink.name=gilbert-elliott --set uplink.p=0.3 --set uplink.burst=8
      safari init my.toml && safari run my.toml --out runs/mine
    """
    with using_config(config, settings, trust):
        wanted = read_config(config, settings, seeds, presets)
        from safari import engine
        from safari.api import new_folder
        from safari.cli.finish import finish, stoppable, watchers

        folder = out or new_folder(wanted.name)
        if not overwrite and (folder / "config.toml").exists():
            raise RunError(
                f"{folder} holds a run already: go on with 'safari resume {folder}', choose another --out, "
                "or replace it with --overwrite"
            )
        with stoppable(folder):
            if jobs == 1:
                engine.run(wanted, folder, watchers(wanted, quiet), overwrite=overwrite)
            else:
                _in_processes(wanted, folder, jobs, overwrite, quiet)
    finish(folder, as_json=as_json, quiet=quiet, suggest=True)


def _in_processes(config: Config, folder: Path, jobs: int, overwrite: bool, quiet: bool) -> None:
    """The seeds, and where these are too few the arms, in processes of their own."""
    from safari.cli.board import Board
    from safari.cli.working import refuse_failed, warn_of_crowd
    from safari.engine import check_and_note
    from safari.report import watchers_for
    from safari.runs import RunFolder
    from safari.sweep import split_for
    from safari.sweep.work import units_of_run, work_off

    if watchers_for(config):
        raise ConfigError(f"--jobs must be 1 where a tracker follows the run (track), got {jobs}")
    problems, notes = check_and_note(config)
    if problems:
        raise ConfigError(problems)
    run = RunFolder.create(folder, config, overwrite=overwrite)
    units = split_for(units_of_run(run), jobs)
    if not quiet:
        for note in notes:
            click.echo(f"note: {note}", err=True)
        warn_of_crowd(jobs, min(jobs, len(units)))
    with Board(units, quiet) as board:
        refuse_failed(work_off(units, [run], board, jobs=jobs))
