"""Common parts of `safari sweep` and `safari reproduce`: options, the work, messages about it."""

from __future__ import annotations

import json
import math
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from safari.cli.options import json_option, quiet_option, set_option, trust_option
from safari.errors import ConfigError, RunError, one_of
from safari.text import visible
from safari.toml import parse_setting
from safari.trust import names_in, using

if TYPE_CHECKING:
    from safari.sweep import Case, Outcome, Results, Sweep, Unit

Units = Mapping[str, Sequence["Unit"]]
F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound="Sweep")
S_contra = TypeVar("S_contra", bound="Sweep", contravariant=True)

# Seconds between two writes of results.json while work goes on.
_SAVE_EVERY = 10.0
# Characters of a title, and of a list of names, that are shown.
_LONGEST_TITLE = 240
LONGEST_LIST = 400


@dataclass(frozen=True)
class Asked:
    """The options that both commands have."""

    settings: tuple[str, ...]
    seeds: int | None
    trust: bool
    quick: bool
    out: Path
    jobs: int
    within: float | None
    only: str | None
    only_arms: str | None
    only_list: bool
    report_only: bool
    others: tuple[Path, ...]
    mix_versions: bool
    as_json: bool
    quiet: bool

    @property
    def changes(self) -> list[tuple[str, Any]]:
        """Settings from --set and --seeds, which apply on top of every case."""
        changes = [parse_setting(text) for text in self.settings]
        return changes + ([("seeds", self.seeds)] if self.seeds is not None else [])

    def using(self) -> AbstractContextManager[None]:
        """The session in which files are read and worked off.

        Cases are made from several files, of which none alone says that the case is known.
        """
        return using(Path("the sweep"), self.trust, names_in(self.changes))


class Report(Protocol[S_contra]):
    """A command's report on its results."""

    def words(self, sweep: S_contra) -> str:
        """A sentence about a sweep, for `--list`."""

    def write(self, sweeps: Sequence[S_contra], results: Results, out: Path) -> str:
        """Write the report; returns the line that says where it is."""

    def show(self, sweeps: Sequence[S_contra], results: Results, out: Path) -> None:
        """Print the report on standard output."""

    def as_json(self, sweep: S_contra, results: Results, out: Path) -> dict[str, Any]:
        """The report on a sweep as values for `--json`."""


def work_options(out: str) -> Callable[[F], F]:
    """The options of `Asked`, with the folder that is theirs by default."""
    options = [
        set_option,
        click.option(
            "--seeds", type=click.IntRange(min=1), help="How many seeds to run.  [default: each file's]"
        ),
        trust_option,
        click.option("--quick", is_flag=True, help="The small version: the file's [quick] table."),
        click.option(
            "--out",
            type=click.Path(path_type=Path, file_okay=False),
            default=Path(out),
            show_default=True,
            help="Where runs, results.json and the report go.",
        ),
        click.option(
            "--jobs",
            type=click.IntRange(min=1),
            default=1,
            show_default=True,
            help="Processes, which share the cores and the GPU.",
        ),
        click.option(
            "--within",
            type=click.FloatRange(min=0),
            metavar="SECONDS",
            help="Stop cleanly after this time; the same command goes on.",
        ),
        click.option(
            "--only",
            metavar="CASES",
            help="Run only the cases that match, such as 'groups.*'; several are separated by commas. The report "
            "has all.",
        ),
        click.option(
            "--arms",
            "only_arms",
            metavar="ARMS",
            help="Run only the arms that match, such as 'drop,safari*'. The report has all.",
        ),
        click.option(
            "--list", "only_list", is_flag=True, help="Only show what there is, and what it would cost."
        ),
        click.option("--report-only", is_flag=True, help="Run nothing; write the report again."),
        click.option(
            "--add",
            "others",
            type=click.Path(path_type=Path, exists=True, file_okay=False),
            multiple=True,
            metavar="FOLDER",
            help="Take in trials that the results.json of this folder has, such as those of another machine. "
            "Repeatable.",
        ),
        click.option(
            "--mix-versions",
            is_flag=True,
            help="Add to trials that another version of the code made; the report says which made what.",
        ),
        json_option,
        quiet_option,
    ]

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def work(sweeps: Sequence[S], asked: Asked, report: Report[S]) -> None:
    """Do what is not done of these sweeps, and report."""
    from safari.sweep import Results

    if asked.within is not None and math.isnan(asked.within):
        raise ConfigError(f"--within must be at least 0 seconds, got {asked.within}")
    out, jobs, quiet = asked.out, asked.jobs, asked.quiet
    results, device = Results.open(out), _device()
    selected = _selected(sweeps, asked.only)
    _add(asked.others, selected, results, quiet or asked.as_json)
    arms = _wanted_arms(selected, asked.only_arms)
    units = _units(selected, arms, out, results, device)
    if asked.only_list:
        _show(selected, arms, units, device, asked.as_json, report)
        return
    _refuse(out, sweeps, asked.report_only and not results.progress(sweeps)[0])
    todo = [] if asked.report_only else _todo(units, jobs)
    if todo and not asked.mix_versions:
        _refuse_versions(sweeps, out, results)
    if todo and not quiet:
        warn_of_crowd(jobs, min(jobs, len(todo)))
    if todo and not quiet:
        _warn_of_schedules(selected)
    outcome, interrupted = _execute(todo, sweeps, results, out, jobs, asked.within, quiet)
    for sweep in sweeps:
        results.gather(sweep, out)
    results.save(out)
    try:
        where = report.write(sweeps, results, out)
    except KeyboardInterrupt:
        interrupted = True
        unwritten = "the report was not written: the same command with --report-only writes it"
        where = f"numbers: {out / 'results.json'}\n{unwritten}"
    if asked.as_json:
        click.echo(
            json.dumps({sweep.name: _as_json(sweep, results, out, report) for sweep in sweeps}, indent=2)
        )
    elif not quiet:
        failed = outcome is not None and bool(outcome.failed)
        left = any(_units(selected, arms, out, results, device).values())
        report.show(sweeps, results, out)
        _tell(sweeps, results, where, left and not failed and not asked.report_only)
    if interrupted:
        raise KeyboardInterrupt
    if outcome is not None:
        refuse_failed(outcome)


def refuse_failed(outcome: Outcome) -> None:
    """RunError where a part of the work failed."""
    if outcome.failed:
        raise RunError("\n".join(f"{label}: {problem.rstrip()}" for label, problem in outcome.failed.items()))


def _selected(sweeps: Sequence[S], only: str | None) -> list[S]:
    """The sweeps with the cases that match a pattern; ConfigError where none does."""
    if only is None:
        return list(sweeps)
    wanted = _matching("--only", only, {case.name for e in sweeps for case in e.cases})
    return [replace(e, cases=tuple(c for c in e.cases if c.name in wanted)) for e in sweeps]


def _wanted_arms(sweeps: Sequence[Sweep], patterns: str | None) -> set[str]:
    """The names of the arms to run: all, or those that match; ConfigError where a pattern matches none."""
    names = {name for e in sweeps for name in e.arms}
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


def _sources(sweep: Sweep, arms: set[str]) -> list[tuple[Case, set[str]]]:
    """The cases that run the trials of these arms, with the arms of each.

    A trial in which nothing is lost is shared, and may be that of a case that was not selected itself.
    """
    found: dict[str, tuple[Case, set[str]]] = {}
    for case in sweep.cases:
        for arm in case.config.arms:
            if arm.name in arms:
                source = case.source(arm)
                found.setdefault(source.name, (source, set()))[1].add(arm.name)
    return list(found.values())


def _units(sweeps: Sequence[Sweep], arms: set[str], out: Path, results: Results, device: str) -> Units:
    """Unfinished units of these arms, by sweep."""
    from safari.sweep import units_of

    return {
        e.name: [
            unit
            for case, names in _sources(e, arms)
            for unit in units_of(case, out, results, getattr(e.cost, device), names)
        ]
        for e in sweeps
    }


def _todo(units: Units, jobs: int) -> list[Unit]:
    from safari.sweep import split_for, without_duplicates

    return split_for(without_duplicates(unit for each in units.values() for unit in each), jobs)


def _add(others: Sequence[Path], sweeps: Sequence[Sweep], results: Results, quiet: bool) -> None:
    """Take in what other folders have of these sweeps."""
    from safari.runs.files import is_there
    from safari.sweep import Results
    from safari.sweep.results import FILE

    for other in others:
        if not is_there(other / FILE):
            raise RunError(f"{other} holds no {FILE} to add")
        count = results.take_in(sweeps, Results.open(other))
        if not quiet:
            trials = (
                f"{count} trial{'' if count == 1 else 's'}" if count else "no trial that is asked for and new"
            )
            click.echo(f"{other}: {trials}", err=True)


def _refuse(out: Path, sweeps: Sequence[Sweep], nothing_new: bool) -> None:
    """RunError where the output folder is a run's own; or, with nothing new to come, has nothing to report."""
    if (out / "config.toml").exists():
        raise RunError(f"{out} holds a run; choose another --out")
    if nothing_new and not _has_numbers(out, sweeps):
        raise RunError(
            f"{out} holds no results.json and no finished trial to report; --out names where they are"
        )


def _refuse_versions(sweeps: Sequence[Sweep], out: Path, results: Results) -> None:
    """RunError where trials of this version would be mixed with those of another."""
    from safari.runs.versions import versions_of
    from safari.sweep import trials_by_version, trials_of
    from safari.version import code_version

    counts = trials_by_version(sweeps, results)
    begun = {
        version
        for sweep in sweeps
        for case in sweep.cases
        for trial in trials_of(case, out)
        for version in versions_of(trial)
    }
    others = sorted({*counts, *begun} - {code_version()})
    if others:
        raise RunError(
            f"{out} holds trials that other versions of the code made ({', '.join(others)}; this one is "
            f"{code_version()}), and new ones would stand beside them. Choose another --out, or add "
            "--mix-versions: then the report says which version made what"
        )


def _execute(
    todo: Sequence[Unit],
    sweeps: Sequence[Sweep],
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
    from safari.sweep import execute

    by_name = {sweep.name: sweep for sweep in sweeps}
    saved = -math.inf

    def keep(unit: Unit) -> None:
        """After each unit, so that a machine that is switched off leaves the results of what it had done.

        Only what is new is read, and the file is written now and then: idle processes wait for this.
        """
        nonlocal saved
        results.gather(by_name[unit.case.sweep], out, [unit.case])
        if time.monotonic() - saved >= _SAVE_EVERY:
            results.save(out)
            saved = time.monotonic()

    with Board(todo, quiet, ended=keep) as board:
        try:
            return execute(todo, out, board, jobs=jobs, within=within), False
        except KeyboardInterrupt:
            return None, True


def _tell(sweeps: Sequence[Sweep], results: Results, where: str, goes_on: bool) -> None:
    """Progress, and where the report is. `goes_on`: the same command has more to do."""
    from safari.sweep.results import several_versions

    mixed = several_versions(sweeps, results)
    if mixed:
        # Versions come from files of the folder.
        click.echo(visible(mixed, 2000), err=True)
    done, asked = results.progress(sweeps)
    rest = "; nothing is lost: the same command goes on" if goes_on else ""
    click.echo(f"{done} of {asked} trials are finished{rest}", err=True)
    click.echo(where, err=True)


@dataclass(frozen=True)
class _Row:
    """A sweep in `--list`; rounds and seconds left are those of trials that are not finished."""

    name: str
    title: str
    words: str
    cases: list[str]
    arms: list[str]
    trials: int
    trials_left: int
    rounds_left: int
    seconds_left: float


def _show(
    sweeps: Sequence[S], arms: set[str], units: Units, device: str, as_json: bool, report: Report[S]
) -> None:
    from safari.cli.board import spoken

    rows = [
        _Row(
            name=e.name,
            title=e.title,
            words=report.words(e),
            cases=[case.name for case in e.cases],
            arms=[name for name in e.arms if name in arms],
            trials=sum(case.trials_among(names) for case, names in _sources(e, arms)),
            trials_left=sum(len(unit.done) for unit in units[e.name]),
            rounds_left=sum(unit.rounds for unit in units[e.name]),
            seconds_left=sum(unit.work for unit in units[e.name]),
        )
        for e in sweeps
    ]
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    where = f"on one {device.upper()} with one process"
    for row in rows:
        click.secho(row.name, bold=True, nl=False)
        click.echo(f"  {visible(row.title)}")
        words = textwrap.shorten(row.words, _LONGEST_TITLE, placeholder=" …")
        for text in (
            *([words] if words else []),
            f"cases: {', '.join(row.cases)}",
            f"arms: {', '.join(row.arms)}",
        ):
            short = visible(text, LONGEST_LIST)
            click.echo(textwrap.fill(short, 98, initial_indent="  ", subsequent_indent="  "))
        left = f"{row.trials_left} not finished, about {spoken(row.seconds_left)} {where}"
        click.echo(
            f"  {len(row.cases)} cases, {row.trials} trials: {left if row.trials_left else 'all finished'}"
        )
    click.echo(f"left in all: about {spoken(sum(row.seconds_left for row in rows))} {where}")


def _has_numbers(out: Path, sweeps: Sequence[Sweep]) -> bool:
    """Whether there are results, or a trial for them: a process that was killed may have left only that."""
    from safari.sweep.numbers import NUMBERS
    from safari.sweep.results import FILE

    return (out / FILE).exists() or any(
        any((out / case.sweep / case.folder).glob(f"trials/*/*/{NUMBERS}"))
        for sweep in sweeps
        for case in sweep.cases
    )


def warn_of_crowd(jobs: int, processes: int) -> None:
    """Warn where there are more processes than cores, and no GPU."""
    from safari.sweep import cores

    if processes > cores() and _device() == "cpu":
        click.echo(
            f"--jobs {jobs}: {processes} processes are more than the cores ({cores()}), and there is no GPU",
            err=True,
        )


def _warn_of_schedules(sweeps: Sequence[Sweep]) -> None:
    from safari.sweep import partial_tests

    for sweep in sweeps:
        for note, cases in partial_tests(sweep).items():
            click.echo(f"note: {sweep.name} ({visible(', '.join(cases), LONGEST_LIST)}): {note}", err=True)


def _device() -> str:
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"


def _as_json(sweep: S, results: Results, out: Path, report: Report[S]) -> dict[str, Any]:
    """Progress and versions of a sweep, and what the report has."""
    from safari.sweep import trials_by_version

    finished, trials = results.progress([sweep])
    code = sorted(trials_by_version([sweep], results))
    return {"finished": finished, "trials": trials, "code": code, **report.as_json(sweep, results, out)}
