"""A sweep as a file: a config, and what is changed about it, one way or in all combinations.

base = "my.toml"                     # a config, relative to this file; without one, the demo's

[set]                                # changes for every case
rounds = 1000

[axes]                               # the values of a field are the cases; of several fields: all combinations
"pruning.sparsity" = [0.5, 0.8]

[axes.pruner]                        # several changes at once have a name
mag     = { pruning.pruner = "mag" }
synflow = { pruning.pruner = "synflow", rounds = 2000 }

[cost]                               # seconds a round of one trial takes, for the estimate beforehand
gpu = 0.016

[quick]                              # what `--quick` has for base, set (but its arms), axes, cost
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

from safari.config import Arm, Config, Plug, examine, override
from safari.engine import KINDS, Problems, check_names, rule_of
from safari.errors import ConfigError, brief, did_you_mean, few, one_of
from safari.plugins import fits, options_of
from safari.sweep.fields import fitting, known, misfits
from safari.text import visible
from safari.toml import read_toml

# What changes where or how fast a run is computed, or what it is called, and not its numbers. Arms and
# seeds are left out because each trial stands alone: another arm is added to a case and begins nothing anew.
_NOT_THE_SETTING = ("name", "seed", "seeds", "arms", "checkpoint", "track")
# More than anybody runs, and few enough to be listed at once.
_MOST_CASES = 10_000
_MOST_SECONDS = 1e6
_MACHINE = {"engine": ("device", "threads", "graph"), "data": ("root", "download")}


@dataclass(frozen=True)
class Cost:
    """Seconds that a round of one trial takes, with one process, as measured once."""

    gpu: float = 0.02
    cpu: float = 0.5


@dataclass(frozen=True)
class Case:
    """One setting of a sweep, with all its arms and seeds. `values` has a name for each axis.

    `sweep` is the name of the sweep. `twin` is an earlier case of it that differs by its links alone: an arm in
    which nothing is ever lost comes out the same there, and is run there only.
    """

    sweep: str
    name: str
    values: tuple[str, ...]
    config: Config
    twin: Case | None = None

    @cached_property
    def setting(self) -> str:
        """A short hash of the setting, without what arms have of their own; see `digest`."""
        return digest(self.config)[:12]

    @property
    def folder(self) -> str:
        """The name of its run's folder: two cases have the same one if and only if they are the same."""
        return f"{self.name}-{self.setting}"

    @property
    def trials(self) -> int:
        """Arms times seeds, without those that are run in its twin."""
        return self.trials_among({arm.name for arm in self.config.arms})

    def trials_among(self, arms: Collection[str]) -> int:
        """Trials of the arms with these names, without those that are run in its twin."""
        here = (arm for arm in self.config.arms if arm.name in arms and self.source(arm) is self)
        return sum(1 for _ in here) * self.config.seeds

    def source(self, arm: Arm) -> Case:
        """The case whose trials an arm's numbers come from."""
        if self.twin is None or arm not in self.twin.config.arms:
            return self
        rule = rule_of(arm.rule)
        return self.twin if rule.overrides_network and not rule.needs_arrival else self


@dataclass(frozen=True)
class Sweep:
    """The cases of a file. `axes` has the names of each axis' values; arms that are `unranked` are never the best."""

    name: str
    title: str
    axes: Mapping[str, tuple[str, ...]]
    cases: tuple[Case, ...]
    unranked: tuple[str, ...]
    cost: Cost

    @property
    def arms(self) -> list[str]:
        """The names of the arms of all cases, each once."""
        return list(dict.fromkeys(arm.name for case in self.cases for arm in case.config.arms))

    @property
    def score(self) -> str:
        """The column that ranks models."""
        tasks = {case.config.task.name for case in self.cases}
        return "perplexity" if tasks == {"tokens"} else "top1"


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """The fields of a file; those who need more of it derive from this (see `read_as`)."""

    title: str = ""
    base: str = ""
    unranked: Sequence[str] = ("perfect",)
    set: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, Any] = field(default_factory=dict)
    cost: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)


T = TypeVar("T")
# Makes of a sweep, the fields of its file and the arms of each case (none while a case is wrong) what its reader wants,
# and adds a line for each thing that is wrong with fields of its own.
Finish = Callable[[Sweep, Mapping[str, Any], Mapping[str, set[str]], list[str]], T]
_QUICK = ("base", "set", "axes", "cost")


def read(
    files: Sequence[Path], settings: Sequence[tuple[str, Any]] = (), *, quick: bool = False
) -> list[Sweep]:
    """The sweeps of these files, each case with `settings` on top. ConfigError lists every problem.

    With `quick`, only those that have a `[quick]` table, in that form. A plug-in's option (`data.root`) goes
    to the cases whose plug-in takes it. When `rounds` is changed, `evaluation.every`, `last` and `last_every`
    keep their proportion to it, unless they are changed, too.
    """
    return read_as(SweepFile, lambda sweep, *_: sweep, files, settings, quick=quick)


def read_as(
    fields: type[SweepFile],
    finish: Finish[T],
    files: Sequence[Path],
    settings: Sequence[tuple[str, Any]] = (),
    *,
    quick: bool = False,
) -> list[T]:
    """Read files with more fields than a sweep has; `finish` makes the result of each."""
    problems: list[str] = []
    found, changes = [], _Settings(settings)
    for path in files:
        table = read_toml(path)
        if quick and not isinstance(table.get("quick"), Mapping):
            continue
        own = list[str]()
        sweep = _sweep(path, table, changes, fields, finish, quick, own)
        problems += few(dict.fromkeys(own), str(path))
        found += [] if sweep is None else [sweep]
    problems += few(changes.problems(unused=not problems), "--set")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return found


class _Settings:
    """Settings that apply on top of every case, with their use and their problems.

    A problem of a setting occurs in every case that takes it, and is reported once.
    """

    def __init__(self, pairs: Sequence[tuple[str, Any]]):
        self.pairs = tuple(pairs)
        self._cases = 0
        self._used: set[str] = set()
        # Names of options that the plug-ins of a section take, for a setting that none of them does.
        self._options: dict[str, set[str]] = {key: set() for key, _ in pairs}
        # Each problem, with the cases that have it.
        self._wrong: dict[str, list[str]] = {}

    def onto(self, table: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Settings that a case takes, out of all; they count as used."""
        self._cases += 1
        taken: list[tuple[str, Any]] = []
        for key, value in self.pairs:
            options = _options(override(table, taken), key)
            if options is None or key.partition(".")[2] in options:
                self._used.add(key)
                taken.append((key, value))
            else:
                self._options[key] |= options
        return taken

    def blame(self, case: str, problems: Iterable[str]) -> None:
        """Record problems of a case that is right without the settings."""
        for problem in problems:
            self._wrong.setdefault(problem, []).append(case)

    def problems(self, *, unused: bool) -> list[str]:
        """A line for each problem. `unused`: also for settings that no case took."""
        found = [self._told(problem, cases) for problem, cases in self._wrong.items()]
        if found or not unused or not self._cases:
            return found
        return [self._unused(key, value) for key, value in self.pairs if key not in self._used]

    def _told(self, problem: str, cases: Sequence[str]) -> str:
        # A field that there is not is named without its value.
        given = next((f"--set {k}={v!r}: " for k, v in self.pairs if problem.startswith(f"{k} is not ")), "")
        if len(cases) == self._cases:
            return given + problem
        more = f" and {len(cases) - 1} more of {self._cases} cases" if len(cases) > 1 else ""
        return f"{cases[0]}{more}: {given}{problem}"

    def _unused(self, key: str, value: Any) -> str:
        head, _, option = key.partition(".")
        names = sorted(self._options[key])
        takes = f"; {head} takes {', '.join(names)}" if names else ""
        return (
            f"--set {key}={value!r}: no plug-in of these cases takes it{did_you_mean(option, names)}{takes}"
        )


def digest(config: Config) -> str:
    """A hash of the setting: of all that a trial's numbers follow from, except its arm and seed.

    What has its default is left out, so that a field that a later version adds changes no name. Feedback
    counts by its effective value, and off is its default: results from before it was automatic keep their names.
    """
    defaults = _outright(Config())
    table: dict[str, Any] = {}
    for key in _outright(config):
        if key in _NOT_THE_SETTING:
            continue
        value = setting_of(config, key)
        if isinstance(value, Mapping) and not isinstance(getattr(config, key), Plug):
            value = {k: v for k, v in value.items() if v != defaults[key][k]}
        if value not in ({}, defaults[key]):
            table[key] = value
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def setting_of(config: Config, field: str) -> Any:
    """A field of a config, without what only says where and how fast it is computed."""
    value = _outright(config)[field]
    if isinstance(value, Mapping):
        return {k: v for k, v in value.items() if k not in _MACHINE.get(field, ())}
    return value


def _outright(config: Config) -> dict[str, Any]:
    table = config.to_dict()
    table["wire"]["feedback"] = config.wire.feeds_back
    if config.evaluation.target == "auto":
        # What every task had by default in results from before there was one for each kind of score.
        table["evaluation"]["target"] = config.evaluation.goal(True)
    return table


def _without_links(config: Config) -> Hashable:
    """Hashable settings without links, name and arms: cases with equal ones differ by their links alone."""
    table = config.to_dict()
    return _frozen({k: v for k, v in table.items() if k not in ("name", "arms", "uplink", "downlink")})


def _frozen(value: Any) -> Hashable:
    """Tables and lists as something hashable that is equal where they are.

    >>> _frozen({"p": [1, 0.5], "q": {}}) == _frozen({"q": {}, "p": [1.0, 0.5]})
    True
    """
    if isinstance(value, Mapping):
        return frozenset((key, _frozen(held)) for key, held in value.items())
    if isinstance(value, list | tuple):
        return tuple(_frozen(held) for held in value)
    return cast(Hashable, value)


def flatten(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Nested tables as settings.

    >>> flatten({"rounds": 5, "uplink": {"name": "sine", "p": [1, 0.3]}})
    [('rounds', 5), ('uplink.name', 'sine'), ('uplink.p', [1, 0.3])]
    """
    found: list[tuple[str, Any]] = []
    for key, value in table.items():
        found += (
            [(f"{key}.{k}", v) for k, v in value.items()] if isinstance(value, Mapping) else [(key, value)]
        )
    return found


def _sweep(
    path: Path,
    table: Mapping[str, Any],
    settings: _Settings,
    fields_of: type[SweepFile],
    finish: Finish[T],
    quick: bool,
    problems: list[str],
) -> T | None:
    name, own = path.stem, list[str]()
    fields = fitting(fields_of, table, "", own)
    replaced = known(fields.pop("quick", {}), _QUICK, "quick.", own)
    whole = dict(fields)
    if quick:
        own += misfits(fields_of, replaced, "quick.")
        fields |= replaced
        fields["set"] = {k: v for k, v in _set_of(whole).items() if k == "arms"} | _set_of(fields)
        whole["axes"] = _axes(whole.get("axes", {}), own)
    cost = fitting(Cost, fields.get("cost", {}), "cost.", own)
    own += [
        f"cost.{key} must lie above 0 and at most at {_MOST_SECONDS:,.0f} seconds, got {value}"
        for key, value in cost.items()
        if not 0 < value <= _MOST_SECONDS
    ]
    axes = fields["axes"] = _axes(fields.get("axes", {}), own)
    if own:
        problems += [f"{path}: {problem}" for problem in own]
        return None
    try:
        variants = _variants(path.parent, fields)
        taken = _variants(path.parent, whole) if quick else {}
    except ConfigError as error:
        problems += [f"{path}: {problem}" for problem in error.problems]
        return None
    cases, arms, right = list[Case](), dict[str, set[str]](), True
    # The first case of those that differ by their links alone: comparing each with all before it takes minutes.
    firsts: dict[Hashable, Case] = {}
    # What --quick or --set has taken away may still be named.
    spare = {arm for left in taken.values() for arm in _arms_of(left)}
    for values, own_table in variants.items():
        changes = settings.onto(own_table)
        case, wrong = _case(name, values, own_table, changes)
        before = _case(name, values, own_table, ())[1] if wrong and changes else wrong
        place = f"{path}, case {case.name}"
        problems += [f"{place}: {problem}" for problem in wrong if problem in before]
        settings.blame(place, [problem for problem in wrong if problem not in before])
        right = right and not wrong
        cases.append(dataclasses.replace(case, twin=firsts.get(key := _without_links(case.config))))
        firsts.setdefault(key, cases[-1])
        arms[case.name] = spare | _arms_of(own_table) | {arm.name for arm in case.config.arms}
    sweep = Sweep(
        name=name,
        title=fields.get("title", ""),
        axes={axis: tuple(values) for axis, values in axes.items()},
        cases=tuple(cases),
        unranked=tuple(fields.get("unranked", SweepFile.unranked)),
        cost=Cost(**cost),
    )
    found = finish(sweep, fields, arms if right else {}, own)
    if right and not own:
        # What is not ranked may also be a rule that only --set brings in.
        everywhere = {*KINDS["rule"], *(arm for there in arms.values() for arm in there)}
        wrong_arms = (
            one_of("unranked", arm, everywhere) for arm in fields.get("unranked", ()) if arm not in everywhere
        )
        own += few(wrong_arms, "it")
    problems += [f"{path}: {problem}" for problem in own]
    return found


def _variants(folder: Path, fields: Mapping[str, Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    """The tables of every case, by its values on the axes; ConfigError where there is no base."""
    path = folder / fields.get("base", "")
    try:
        if "base" in fields and path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a file")
        base = read_toml(path) if "base" in fields else Config().to_dict()
    except ConfigError as error:
        raise ConfigError([f"base: {problem}" for problem in error.problems]) from error
    except OSError as error:  # a name that is too long, or in a folder that is closed
        raise ConfigError(f"base: cannot read {brief(fields['base'])}: {error.strerror}") from error
    base, axes = override(base, flatten(fields.get("set", {}))), fields.get("axes", {})
    found = {}
    for values in itertools.product(*axes.values()):
        changes = [
            pair for axis, value in zip(axes, values, strict=True) for pair in flatten(axes[axis][value])
        ]
        found[values] = override(base, changes)
    return found


def _set_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    table = fields.get("set", {})
    return dict(table) if isinstance(table, Mapping) else {}


def _arms_of(table: Mapping[str, Any]) -> set[str]:
    return {arm.name for arm in examine(table)[0].arms}


def _case(
    sweep: str,
    values: tuple[str, ...],
    table: Mapping[str, Any],
    changes: Sequence[tuple[str, Any]],
) -> tuple[Case, list[str]]:
    """A case with changes on top, and its problems."""
    changed = override(table, changes)
    given = dict(changes)
    if "rounds" in given and fits(given["rounds"], int) and given["rounds"] >= 1:
        changed = _in_proportion(table, changed, given)
    case_name = ".".join(values) or "main"
    changed["name"] = f"{sweep}.{case_name}"
    config, wrong = examine(changed)
    found = Problems()
    check_names(config, found)
    return Case(sweep, case_name, values, config), wrong + [line for line in found.lines if not wrong]


def _in_proportion(
    before: Mapping[str, Any], after: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    old, problems = examine(before)
    if problems:
        return dict(after)
    share = given["rounds"] / old.rounds
    evaluation = dataclasses.asdict(old.evaluation)
    scaled = [
        (f"evaluation.{key}", max(1, round(evaluation[key] * share)))
        for key in ("every", "last", "last_every")
        if evaluation[key] and f"evaluation.{key}" not in given
    ]
    return override(after, scaled)


def _options(table: Mapping[str, Any], key: str) -> set[str] | None:
    """The options of this case's plug-in, where a setting is one of a plug-in; None: it is meant for every case."""
    head, _, option = key.partition(".")
    kind = next((kind for kind in KINDS.values() if head in kind.tables and kind.key == "name"), None)
    default = getattr(Config(), head, None)
    if kind is None or option in ("", "name") or not isinstance(default, Plug):
        return None
    section = table.get(head, {})
    name = section.get("name", default.name) if isinstance(section, Mapping) else default.name
    try:
        return {o.name for o in options_of(kind.find(name, head))}
    except ConfigError:
        return None  # a problem of the name is reported where the case is checked


def _axes(table: Mapping[str, Any], problems: list[str]) -> dict[str, dict[str, Mapping[str, Any]]]:
    axes = {}
    for axis, values in table.items():
        shown = visible(axis, 60)
        if isinstance(values, list) and values:
            # The axis is a field itself.
            values = {str(value): {axis: value} for value in values}
        if not isinstance(values, Mapping) or not values:
            problems.append(f"axes.{shown} must be a table of cases or a list of values, got {brief(values)}")
            continue
        for value, changes in values.items():
            if not isinstance(changes, Mapping):
                problems.append(
                    f"axes.{shown}.{visible(value, 60)} must be a table of changes, got {brief(changes)}"
                )
            if not value.replace("-", "").replace("_", "").replace(".", "").isalnum() or not value.isascii():
                problems.append(
                    f"axes.{shown}: a name may hold letters, digits, and . _ - only, got {brief(value)}"
                )
        axes[axis] = dict(values)
    count = math.prod(len(values) for values in axes.values())
    if count > _MOST_CASES:
        problems.append(f"axes must give at most {_MOST_CASES:,} cases together, got {count:,}")
    return axes
