"""`safari reproduce`."""

from __future__ import annotations

import json
import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from safari.cli.offers import complete_experiment
from safari.cli.options import json_option, quiet_option, set_option
from safari.errors import ConfigError, RunError, one_of
from safari.text import visible
from safari.toml import parse_setting

if TYPE_CHECKING:
    from safari.evidence import Case, Experiment, Outcome, Results, Unit

Units = Mapping[str, Sequence["Unit"]]

# Seconds between two writes of results.json while work goes on.
_SAVE_EVERY = 10.0
# Characters of a claim, and of a list of names, that are shown.
_LONGEST_CLAIM = 240
_LONGEST_LIST = 400


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
@click.option(
    "--only",
    metavar="CASES",
    help="Run only the cases that match, such as 'groups.*'; several are separated by commas. The page has all.",
)
@click.option(
    "--arms",
    "only_arms",
    metavar="ARMS",
    help="Run only the arms that match, such as 'drop,safari*'. The page has all.",
)
@click.option("--list", "only_list", is_flag=True, help="Only show what there is, and what it would cost.")
@click.option("--report-only", is_flag=True, help="Run nothing; write the page again.")
@click.option("--no-report", is_flag=True, help="Leave the page for later: only runs and results.json.")
@click.option(
    "--add",
    "others",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    multiple=True,
    metavar="FOLDER",
    help="Take in trials that the results.json of this folder has, such as those of another machine. Repeatable.",
)
@click.option(
    "--mix-versions",
    is_flag=True,
    help="Add to trials that another version of the code made; the page says which made what.",
)
@click.option(
    "--from",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder of experiment files.  [default: those that come with the package]",
)
@json_option
@quiet_option
def reproduce(
    names: tuple[str, ...],
    settings: tuple[str, ...],
    seeds: int | None,
    quick: bool,
    out: Path,
    jobs: int,
    within: float | None,
    only: str | None,
    only_arms: str | None,
    only_list: bool,
    report_only: bool,
    no_report: bool,
    others: tuple[Path, ...],
    mix_versions: bool,
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
      safari reproduce rules --only 'fedavg.groups.*,*.iid.labels' --seeds 3
      safari reproduce rules --arms 'perfect,drop,safari+' --seeds 3
      safari reproduce accuracy --report-only
      safari reproduce accuracy --add FROM-ANOTHER-MACHINE
    """
    from safari.evidence import Results

    if within is not None and math.isnan(within):
        raise ConfigError(f"--within must be at least 0 seconds, got {within}")
    changes = [parse_setting(text) for text in settings] + ([("seeds", seeds)] if seeds is not None else [])
    experiments = _read(names, changes, quick, folder)
    results, device = Results.open(out), _device()
    selected = _selected(experiments, only)
    _add(others, selected, results, quiet or as_json)
    arms = _wanted_arms(selected, only_arms)
    units = _units(selected, arms, out, results, device)
    if only_list:
        _show(selected, arms, units, device, as_json)
        return
    _refuse(out, experiments, report_only and not results.progress(experiments)[0])
    todo = [] if report_only else _todo(units, jobs)
    if todo and not mix_versions:
        _refuse_versions(experiments, out, results)
    if todo and not quiet and device == "cpu":
        _warn_of_crowd(jobs, min(jobs, len(todo)))
    if todo and not quiet:
        _warn_of_schedules(selected)
    outcome, interrupted = _execute(todo, experiments, results, out, jobs, within, quiet)
    for experiment in experiments:
        results.gather(experiment, out)
    results.save(out)
    page = None
    try:
        page = None if no_report else _write_page(experiments, results, out, own=folder is not None)
    except KeyboardInterrupt:
        interrupted = True
    if as_json:
        click.echo(json.dumps(_as_json(experiments, results), indent=2))
    elif not quiet:
        failed = outcome is not None and bool(outcome.failed)
        left = any(_units(selected, arms, out, results, device).values())
        _tell(experiments, results, out, page, no_report, left and not failed and not report_only)
    if interrupted:
        raise KeyboardInterrupt
    if outcome is not None and outcome.failed:
        raise RunError("\n".join(f"{label}: {problem.rstrip()}" for label, problem in outcome.failed.items()))


def _read(
    names: Sequence[str], changes: Sequence[tuple[str, Any]], quick: bool, folder: Path | None
) -> list[Experiment]:
    from safari.evidence import find, read, shipped

    experiments = read(find(folder or shipped(), names), changes, quick=quick)
    for name in names:
        if name not in {e.name for e in experiments}:
            raise ConfigError(f"{name} has no small version: run it without --quick")
    return experiments


def _selected(experiments: Sequence[Experiment], only: str | None) -> list[Experiment]:
    """The experiments with the cases that match a pattern; ConfigError where none does."""
    if only is None:
        return list(experiments)
    wanted = _matching("--only", only, {case.name for e in experiments for case in e.cases})
    return [replace(e, cases=tuple(c for c in e.cases if c.name in wanted)) for e in experiments]


def _wanted_arms(experiments: Sequence[Experiment], patterns: str | None) -> set[str]:
    """The names of the arms to run: all, or those that match; ConfigError where a pattern matches none."""
    names = {name for e in experiments for name in e.arms}
    return names if patterns is None else _matching("--arms", patterns, names)


def _matching(option: str, patterns: str, names: set[str]) -> set[str]:
    """The names that match one of several patterns, separated by commas; each has to match some name."""
    found: set[str] = set()
    for pattern in (pattern.strip() for pattern in patterns.split(",")):
        matches = {name for name in names if fnmatchcase(name, pattern)}
        if not matches:
            raise ConfigError(one_of(option, pattern, names))
        found |= matches
    return found


def _sources(experiment: Experiment, arms: set[str]) -> list[tuple[Case, set[str]]]:
    """The cases that run the trials of these arms, with the arms of each.

    A trial in which nothing is lost is shared, and may be that of a case that was not selected itself.
    """
    found: dict[str, tuple[Case, set[str]]] = {}
    for case in experiment.cases:
        for arm in case.config.arms:
            if arm.name in arms:
                source = case.source(arm)
                found.setdefault(source.name, (source, set()))[1].add(arm.name)
    return list(found.values())


def _units(
    experiments: Sequence[Experiment], arms: set[str], out: Path, results: Results, device: str
) -> Units:
    """What is not finished of these arms, by experiment."""
    from safari.evidence import units_of

    return {
        e.name: [
            unit
            for case, names in _sources(e, arms)
            for unit in units_of(case, out, results, getattr(e.cost, device), names)
        ]
        for e in experiments
    }


def _todo(units: Units, jobs: int) -> list[Unit]:
    from safari.evidence import split_for, without_duplicates

    return split_for(without_duplicates(unit for each in units.values() for unit in each), jobs)


def _add(others: Sequence[Path], experiments: Sequence[Experiment], results: Results, quiet: bool) -> None:
    """Take in what other folders have of these experiments."""
    from safari.evidence import Results
    from safari.evidence.results import FILE
    from safari.runs.files import is_there

    for other in others:
        if not is_there(other / FILE):
            raise RunError(f"{other} holds no {FILE} to add")
        count = results.take_in(experiments, Results.open(other))
        if not quiet:
            trials = (
                f"{count} trial{'' if count == 1 else 's'}" if count else "no trial that is asked for and new"
            )
            click.echo(f"{other}: {trials}", err=True)


def _refuse(out: Path, experiments: Sequence[Experiment], nothing_new: bool) -> None:
    """RunError where the output folder is a run's own; or, with nothing new to come, has nothing to report."""
    if (out / "config.toml").exists():
        raise RunError(f"{out} holds a run; choose another --out")
    if nothing_new and not _has_numbers(out, experiments):
        raise RunError(
            f"{out} holds no results.json and no finished trial to report; --out names where they are"
        )


def _refuse_versions(experiments: Sequence[Experiment], out: Path, results: Results) -> None:
    """RunError where trials of this version would stand beside those of another."""
    from safari.evidence import trials_of
    from safari.evidence.tables import made_by
    from safari.runs.versions import versions_of
    from safari.version import code_version

    counts = made_by(experiments, results)
    begun = {
        version
        for experiment in experiments
        for case in experiment.cases
        for trial in trials_of(case, out)
        for version in versions_of(trial)
    }
    others = sorted({*counts, *begun} - {code_version()})
    if others:
        raise RunError(
            f"{out} holds trials that other versions of the code made ({', '.join(others)}; this one is "
            f"{code_version()}), and new ones would stand beside them. Choose another --out, or add "
            "--mix-versions: then the page says which version made what"
        )


def _execute(
    todo: Sequence[Unit],
    experiments: Sequence[Experiment],
    results: Results,
    out: Path,
    jobs: int,
    within: float | None,
    quiet: bool,
) -> tuple[Outcome | None, bool]:
    """Do the work; the outcome where there was any, and whether Ctrl-C ended it."""
    if not todo:
        return None, False
    from safari.cli.board import Board
    from safari.evidence import execute

    by_name = {experiment.name: experiment for experiment in experiments}
    saved = -math.inf

    def keep(unit: Unit) -> None:
        """After each unit, so that a machine that is switched off leaves the results of what it had done.

        Only what is new is read, and the file is written now and then: idle processes wait for this.
        """
        nonlocal saved
        results.gather(by_name[unit.case.experiment], out, [unit.case])
        if time.monotonic() - saved >= _SAVE_EVERY:
            results.save(out)
            saved = time.monotonic()

    with Board(todo, quiet, ended=keep) as board:
        try:
            return execute(todo, out, board, jobs=jobs, within=within), False
        except KeyboardInterrupt:
            return None, True


def _write_page(experiments: Sequence[Experiment], results: Results, out: Path, *, own: bool) -> Path:
    from safari.evidence.page import TITLE, write_page

    return write_page(experiments, results, out, "Experiments" if own else TITLE)


def _tell(
    experiments: Sequence[Experiment],
    results: Results,
    out: Path,
    page: Path | None,
    no_report: bool,
    goes_on: bool,
) -> None:
    """Verdicts, progress, and where the page is. `goes_on`: the same command has more to do."""
    from safari.evidence.compare import judge, spelled_p
    from safari.evidence.page import several_versions

    for experiment in experiments:
        for verdict in judge(experiment, results):
            if verdict.status != "not finished":
                p = "" if verdict.p is None else f" (p {spelled_p(verdict.p)} after Holm's correction)"
                says = visible(verdict.check.says, _LONGEST_CLAIM)
                click.echo(f"{experiment.name}: {says}: {verdict.status}{p}")
                for part in verdict.parts:
                    click.echo(f"  {part}")
    mixed = several_versions(experiments, results)
    if mixed:
        # Versions come from files of the folder.
        click.echo(visible(mixed, 2000), err=True)
    done, asked = results.progress(experiments)
    rest = "; nothing is lost: the same command goes on" if goes_on else ""
    click.echo(f"{done} of {asked} trials are finished{rest}", err=True)
    click.echo(f"report: {page}" if page else f"numbers: {out / 'results.json'}", err=True)
    if page is None and not no_report:
        click.echo("the page was not written: the same command with --report-only writes it", err=True)


@dataclass(frozen=True)
class _Row:
    """An experiment in `--list`; what is left is of trials that are not finished."""

    name: str
    title: str
    claim: str
    cases: list[str]
    arms: list[str]
    trials: int
    trials_left: int
    rounds_left: int
    seconds_left: float


def _show(
    experiments: Sequence[Experiment], arms: set[str], units: Units, device: str, as_json: bool
) -> None:
    from safari.cli.board import spoken

    rows = [
        _Row(
            name=e.name,
            title=e.title,
            claim=e.claim,
            cases=[case.name for case in e.cases],
            arms=[name for name in e.arms if name in arms],
            trials=sum(case.trials_among(names) for case, names in _sources(e, arms)),
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
        click.echo(f"  {visible(row.title)}")
        claim = textwrap.shorten(row.claim, _LONGEST_CLAIM, placeholder=" …")
        for text in (claim, f"cases: {', '.join(row.cases)}", f"arms: {', '.join(row.arms)}"):
            short = visible(text, _LONGEST_LIST)
            click.echo(textwrap.fill(short, 98, initial_indent="  ", subsequent_indent="  "))
        left = f"{row.trials_left} not finished, about {spoken(row.seconds_left)} {where}"
        click.echo(
            f"  {len(row.cases)} cases, {row.trials} trials: {left if row.trials_left else 'all finished'}"
        )
    click.echo(f"left in all: about {spoken(sum(row.seconds_left for row in rows))} {where}")


def _has_numbers(out: Path, experiments: Sequence[Experiment]) -> bool:
    """Whether there are results, or a trial for them: a process that was killed may have left only that."""
    from safari.evidence.numbers import NUMBERS
    from safari.evidence.results import FILE

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


def _warn_of_schedules(experiments: Sequence[Experiment]) -> None:
    from safari.evidence import partial_tests

    for experiment in experiments:
        for note, cases in partial_tests(experiment).items():
            click.echo(
                f"note: {experiment.name} ({visible(', '.join(cases), _LONGEST_LIST)}): {note}", err=True
            )


def _device() -> str:
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"


def _as_json(experiments: Sequence[Experiment], results: Results) -> dict[str, dict[str, Any]]:
    """Progress, versions and verdicts of each experiment."""
    from safari.evidence.compare import judge
    from safari.evidence.tables import made_by

    found = {}
    for experiment in experiments:
        finished, trials = results.progress([experiment])
        verdicts = [
            {
                "claim": verdict.check.says,
                "verdict": verdict.status,
                "p": verdict.p,
                "parts": [asdict(part) for part in verdict.parts],
            }
            for verdict in judge(experiment, results)
        ]
        found[experiment.name] = {
            "finished": finished,
            "trials": trials,
            "code": sorted(made_by([experiment], results)),
            "verdicts": verdicts,
        }
    return found
