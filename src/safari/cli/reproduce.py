"""`safari reproduce`."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from safari.cli.offers import complete_experiment
from safari.cli.options import json_option, quiet_option, set_option
from safari.errors import ConfigError, RunError
from safari.toml import parse_setting

if TYPE_CHECKING:
    from safari.evidence import Book, Experiment, Unit


@click.command(short_help="Run the claims of the paper again.")
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=complete_experiment)
@set_option
@click.option("--seeds", type=click.IntRange(min=1), help="How many seeds to run.  [default: each file's]")
@click.option("--quick", is_flag=True, help="The small version, on the embedded digits, where there is one.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs/reproduce"),
    show_default=True,
    help="Where runs, results.json and report.html go.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes, which share the cores and the GPU.",
)
@click.option(
    "--within",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Stop cleanly after this time; the same command goes on.",
)
@click.option("--list", "only_list", is_flag=True, help="Only show what there is, and what it would cost.")
@click.option("--report-only", is_flag=True, help="Run nothing; write the page again.")
@click.option("--no-report", is_flag=True, help="Leave the page for later: only runs and results.json.")
@click.option(
    "--from",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder of experiment files.  [default: those that come with the package]",
)
@json_option
@quiet_option
def reproduce(  # noqa: C901
    names: tuple[str, ...],
    settings: tuple[str, ...],
    seeds: int | None,
    quick: bool,
    out: Path,
    jobs: int,
    within: float | None,
    only_list: bool,
    report_only: bool,
    no_report: bool,
    folder: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run the claims of the paper again: the experiments NAME, or all of them.

    Each experiment is a file: the paper's words, a setting, the cases to compare. What is finished is never
    run twice, and what was interrupted goes on. The report, with the paper's words beside the figures, shows
    what is done so far.

    \b
    Examples:
      safari reproduce --list
      safari reproduce digits
      safari reproduce accuracy sparsity --jobs 6 --set rounds=500
      safari reproduce accuracy --report-only
    """
    from safari.evidence import Book, execute, find, once, read, shared_out, shipped, units_of
    from safari.evidence.page import write_page

    if within is not None and math.isnan(within):
        raise ConfigError(f"--within must be at least 0 seconds, got {within}")
    changes = [parse_setting(text) for text in settings] + ([("seeds", seeds)] if seeds is not None else [])
    experiments = read(find(folder or shipped(), names), changes, quick=quick)
    for name in names:
        if name not in {e.name for e in experiments}:
            raise ConfigError(f"{name} has no small version: run it without --quick")
    book = Book.open(out)
    device = _device()
    units = {
        e.name: [u for case in e.cases for u in units_of(case, out, book, getattr(e.cost, device))]
        for e in experiments
    }
    if only_list:
        _show(experiments, units, device, as_json)
        return
    if (out / "config.toml").exists():
        raise RunError(f"{out} holds a run; choose another --out")
    if report_only and not _has_numbers(out, experiments):
        raise RunError(
            f"{out} holds no results.json and no finished trial to report; --out names where they are"
        )
    todo = [] if report_only else shared_out(once(unit for each in units.values() for unit in each), jobs)
    interrupted = False
    ending = None
    if todo:
        from safari.cli.board import Board

        if not quiet and device == "cpu":
            _warn_of_crowd(jobs, min(jobs, len(todo)))
        by_name = {experiment.name: experiment for experiment in experiments}

        def keep(unit: Unit) -> None:
            """So that a machine that is switched off leaves a book of what it had done."""
            book.gather(by_name[unit.case.experiment], out)
            book.save(out)

        with Board(todo, quiet, ended=keep) as board:
            try:
                ending = execute(todo, out, board, jobs=jobs, within=within)
            except KeyboardInterrupt:
                interrupted = True
    for experiment in experiments:
        book.gather(experiment, out)
    book.save(out)
    page = None
    try:
        if not no_report:
            page = write_page(experiments, book, out)
    except KeyboardInterrupt:
        interrupted = True
    if as_json:
        click.echo(json.dumps(_progress(experiments, book), indent=2))
    elif not quiet:
        done, asked = book.progress(experiments)
        rest = "" if done == asked else "; nothing is lost: the same command goes on"
        click.echo(f"{done} of {asked} trials are finished{rest}", err=True)
        click.echo(f"report: {page}" if page else f"numbers: {out / 'results.json'}", err=True)
        if page is None and not no_report:
            click.echo("the page was not written: the same command with --report-only writes it", err=True)
    if interrupted:
        raise KeyboardInterrupt
    if ending is not None and ending.failed:
        raise RunError("\n".join(f"{label}: {problem.rstrip()}" for label, problem in ending.failed.items()))


@dataclass(frozen=True)
class _Row:
    """An experiment in `--list`; what is left is of trials that are not finished."""

    name: str
    title: str
    claim: str
    cases: list[str]
    trials: int
    trials_left: int
    rounds_left: int
    seconds_left: float


def _show(
    experiments: Sequence[Experiment], units: Mapping[str, Sequence[Unit]], device: str, as_json: bool
) -> None:
    from safari.cli.board import spoken

    rows = [
        _Row(
            name=e.name,
            title=e.title,
            claim=e.claim,
            cases=[case.name for case in e.cases],
            trials=sum(case.trials for case in e.cases),
            trials_left=sum(len(unit.done) for unit in units[e.name]),
            rounds_left=sum(unit.rounds for unit in units[e.name]),
            seconds_left=sum(unit.work for unit in units[e.name]),
        )
        for e in experiments
    ]
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    where = f"on one {device.upper()} with one process"
    for row in rows:
        click.secho(row.name, bold=True, nl=False)
        click.echo(f"  {row.title}")
        claim = textwrap.shorten(row.claim, 240, placeholder=" …")
        click.echo(textwrap.fill(claim, 98, initial_indent="  ", subsequent_indent="  "))
        left = f"{row.trials_left} not finished, about {spoken(row.seconds_left)} {where}"
        click.echo(
            f"  {len(row.cases)} cases, {row.trials} trials: {left if row.trials_left else 'all finished'}"
        )
    click.echo(f"left in all: about {spoken(sum(row.seconds_left for row in rows))} {where}")


def _has_numbers(out: Path, experiments: Sequence[Experiment]) -> bool:
    """Whether there is a book, or a trial for one: a process that was killed may have left only that."""
    from safari.evidence.book import FILE
    from safari.evidence.numbers import NUMBERS

    return (out / FILE).exists() or any(
        any((out / case.experiment / case.folder).glob(f"trials/*/*/{NUMBERS}"))
        for experiment in experiments
        for case in experiment.cases
    )


def _warn_of_crowd(jobs: int, processes: int) -> None:
    from safari.evidence import cores

    if processes > cores():
        click.echo(
            f"--jobs {jobs}: {processes} processes are more than the cores ({cores()}), and there is no GPU",
            err=True,
        )


def _device() -> str:
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"


def _progress(experiments: Sequence[Experiment], book: Book) -> dict[str, dict[str, int]]:
    return {e.name: dict(zip(("finished", "trials"), book.progress([e]), strict=True)) for e in experiments}
