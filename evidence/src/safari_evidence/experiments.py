"""An experiment file: a sweep with the paper's words, and what the numbers must satisfy.

title = "Accuracy against rounds"
claim = "what the paper says, in its words"
base  = "base/cifar10.toml"          # and all that a sweep has: set, axes, cost, quick
show  = ["curves"]                   # which figures the report has

[[checks]]                           # what the numbers must satisfy for the claim to hold
says = "SAFARI converges like a perfect network"
arm = "safari"
against = "perfect"
margin = 0.01
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safari.errors import ConfigError, few, one_of
from safari.sweep import Sweep, SweepFile, read_as
from safari.toml import read_toml
from safari_evidence.checks import Check, read_check, wrong_arms, wrong_cases

FIGURES = (
    "curves", "average", "loss", "top5", "perplexity", "bytes", "sweep", "behind", "matrix", "similarity", "groups",
    "diagnosis",
)  # fmt: skip
# Each is held against every case.
_MOST_CHECKS = 1_000


@dataclass(frozen=True)
class Experiment(Sweep):
    """A claim and the cases that test it."""

    claim: str
    finding: str
    show: tuple[str, ...]
    checks: tuple[Check, ...]
    # The arm that is compared with every rival, and the CASE/ARM whose final accuracy is the goal; "": none.
    compare: str
    goal: str


@dataclass(frozen=True, kw_only=True)
class _File(SweepFile):
    """The fields of an experiment file."""

    title: str = field()
    claim: str = field()
    base: str = field()
    finding: str = ""
    show: Sequence[str] = ("curves",)
    compare: str = ""
    goal: str = ""
    checks: Sequence[Any] = ()


def read(
    files: Sequence[Path], settings: Sequence[tuple[str, Any]] = (), *, quick: bool = False
) -> list[Experiment]:
    """The experiments of these files, each case with `settings` on top; see `safari.sweep.read`."""
    found = read_as(_File, _experiment, files, settings, quick=quick)
    # What came out of the whole experiment says nothing of the small one; what it compares stays.
    return [dataclasses.replace(experiment, finding="") for experiment in found] if quick else found


def _experiment(
    sweep: Sweep, fields: Mapping[str, Any], arms: Mapping[str, set[str]], problems: list[str]
) -> Experiment:
    checks = _checks(fields.get("checks", ()), problems)
    problems += [one_of("show", item, FIGURES) for item in fields.get("show", ()) if item not in FIGURES]
    experiment = Experiment(
        **{f.name: getattr(sweep, f.name) for f in dataclasses.fields(sweep)},
        claim=fields["claim"].strip(),
        finding=fields.get("finding", "").strip(),
        show=tuple(fields.get("show", _File.show)),
        checks=tuple(checks),
        compare=fields.get("compare", ""),
        goal=fields.get("goal", ""),
    )
    if not problems:
        problems += few(wrong_cases(checks, {case.name: case.config for case in sweep.cases}), "it")
    if arms and not problems:
        problems += few(wrong_arms(checks, arms), "it")
        problems += _wrong_names(experiment, arms)
    return experiment


def _checks(items: Sequence[Any], problems: list[str]) -> list[Check]:
    if len(items) > _MOST_CHECKS:
        problems.append(f"checks must be at most {_MOST_CHECKS:,}, got {len(items):,}")
        return []
    read = [read_check(item, k, problems) for k, item in enumerate(items)]
    return [check for check in read if check is not None]


def _wrong_names(experiment: Experiment, arms: Mapping[str, set[str]]) -> list[str]:
    """An arm to compare, or a goal, that is not there."""
    everywhere = {arm for there in arms.values() for arm in there}
    places = {f"{case}/{arm}" for case, there in arms.items() for arm in there}
    compare, goal = experiment.compare, experiment.goal
    found = [one_of("compare", compare, everywhere)] if compare and compare not in everywhere else []
    return found + ([one_of("goal", goal, places)] if goal and goal not in places else [])


def find(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """The experiment files of a folder, or those with these names; ConfigError for one that is not there.

    A file that another one names as its base is no experiment.
    """
    # A pipe would be waited for.
    files = {path.stem: path for path in sorted(folder.glob("*.toml")) if path.is_file()}
    if not files:
        raise ConfigError(f"no experiments (*.toml) in {folder}; --from names another folder")
    bases = _bases(files.values())
    # All of them only where files name each other, and then reading them tells what is wrong.
    experiments = {name: path for name, path in files.items() if path not in bases} or files
    wrong = [_wrong_name(name, files, bases, experiments) for name in names if name not in experiments]
    if wrong:
        raise ConfigError(wrong)
    return [files[name] for name in dict.fromkeys(names)] if names else list(experiments.values())


def _wrong_name(
    name: str, files: Mapping[str, Path], bases: Mapping[Path, Path], experiments: Iterable[str]
) -> str:
    if name in files:
        return f"{files[name]} is the base of {bases[files[name]].name}, not an experiment"
    if name.endswith(".toml"):
        path = Path(name)
        return (
            f"NAME is that of an experiment, not of its file: {path.stem} --from {path.parent}; got {name!r}"
        )
    return one_of("NAME", name, experiments)


def _bases(files: Iterable[Path]) -> dict[Path, Path]:
    """The files that others of the same folder name as their base, each with the first that does."""
    paths = list(files)
    found: dict[Path, Path] = {}
    for path in paths:
        try:
            table = read_toml(path)
        except ConfigError:
            continue  # told when it is the one that is asked for
        quick = table.get("quick")
        for part in (table, quick if isinstance(quick, Mapping) else {}):
            base = part.get("base")
            named = path.parent / base if isinstance(base, str) else path
            if named in paths and named != path:
                found.setdefault(named, path)
    return found
