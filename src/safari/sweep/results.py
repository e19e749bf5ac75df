"""results.json: the numbers of every finished trial, in one small file that can go to another machine.

A trial in this file counts as finished even where its run's folder is not: work goes on from it on a new
machine, and the report needs nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safari.config import Arm
from safari.errors import MissingExtraError, RunError
from safari.runs import seeds_of, spread
from safari.runs.files import is_there, making, read_object, remove, temporaries, write_atomically
from safari.sweep.numbers import (
    Numbers,
    made_by,
    maker_of,
    maker_problem,
    problem_of,
    read_numbers,
    text_problem,
)
from safari.sweep.plan import Case, Sweep
from safari.text import visible

if TYPE_CHECKING:
    from pandas import DataFrame

FILE = "results.json"
# What is said of trials from before a record named its code.
UNKNOWN = "unknown"
FORMAT = "safari-evidence-2"


def identity(case: Case, arm: Arm, seed: int) -> tuple[str, str, int]:
    """Identity of a trial across all sweeps: the setting, the rule as it is now, the seed."""
    return case.source(arm).setting, json.dumps(maker_of(arm), sort_keys=True), seed


@dataclass
class Results:
    """Entries by sweep, case, arm and seed; `environments` are the machines that made them."""

    entries: dict[str, Any]
    environments: list[dict[str, Any]]

    @classmethod
    def open(cls, out: Path) -> Results:
        """The results of an output folder; empty where there are none."""
        path = out / FILE
        if not is_there(path):
            return cls({}, [])
        table = read_object(path)
        if table.get("format") != FORMAT:
            raise RunError(f"{path}: format must be {FORMAT}, got {str(table.get('format'))[:60]!r}")
        if problem := _problem(table):
            raise RunError(f"{path} does not hold results: {problem}")
        return cls(table["experiments"], table["environments"])

    def save(self, out: Path) -> None:
        """Write the results atomically, and remove half-written files of a killed process, the page's too."""
        table = {"format": FORMAT, "environments": self.environments, "experiments": self.entries}
        with making(out):
            for left_by_a_crash in temporaries(out, abandoned=True):
                remove(left_by_a_crash, out)
            write_atomically(out / FILE, (json.dumps(table, separators=(",", ":")) + "\n").encode())

    def trial(self, case: Case, arm: Arm, seed: int) -> Numbers | None:
        """A finished trial of this setting and rule, whichever sweep made it, or None."""
        return self._seeds(case, arm).get(str(seed))

    def arm(self, case: Case, arm: Arm) -> dict[int, Numbers]:
        """The finished seeds of an arm, of those that the case asks for."""
        found = self._seeds(case, arm)
        return {seed: found[str(seed)] for seed in seeds_of(case.config) if str(seed) in found}

    def _seeds(self, case: Case, arm: Arm) -> dict[str, Numbers]:
        """The finished seeds of this setting and rule; of two sweeps that made the same one, the first counts."""
        setting, found = case.source(arm).setting, dict[str, Numbers]()
        for about in self.entries.values():
            for entry in about["cases"].values():
                for made in entry["arms"].values() if entry["setting"] == setting else ():
                    if made_by(made, arm):
                        found = {**made["seeds"], **found}
        return found

    def arms(self, case: Case) -> dict[str, dict[int, Numbers]]:
        """The finished seeds of every arm of a case."""
        return {arm.name: self.arm(case, arm) for arm in case.config.arms}

    def frame(self) -> DataFrame:
        """A row for each finished trial: sweep, case, arm, seed, and its final numbers; needs the extra `pandas`."""
        try:
            import pandas
        except ImportError as error:
            raise MissingExtraError("pandas", "pandas", "data frames") from error
        rows = [
            {"sweep": name, "case": case, "arm": arm, "seed": int(seed)}
            | {key: value for key, value in numbers.items() if not isinstance(value, dict | list)}
            for name, about in self.entries.items()
            for case, entry in about["cases"].items()
            for arm, made in entry["arms"].items()
            for seed, numbers in made["seeds"].items()
        ]
        return pandas.DataFrame(rows)

    def progress(self, sweeps: Sequence[Sweep]) -> tuple[int, int]:
        """Number of finished trials and of requested ones; a trial that several cases request counts once."""
        asked: dict[tuple[str, str, int], bool] = {}
        for case in (case for sweep in sweeps for case in sweep.cases):
            for arm in case.config.arms:
                done = self.arm(case, arm)
                asked |= {identity(case, arm, seed): seed in done for seed in seeds_of(case.config)}
        return sum(asked.values()), len(asked)

    def gather(self, sweep: Sweep, out: Path, cases: Sequence[Case] | None = None) -> None:
        """Take in the trials in the run folders of these cases, by default of all.

        A setting that has changed since begins a new entry.
        """
        about = self.entries.setdefault(sweep.name, {"cases": {}})
        about["title"] = sweep.title
        for case in sweep.cases if cases is None else cases:
            self._gather_case(case, out / case.sweep / case.folder)

    def _gather_case(self, case: Case, path: Path) -> None:
        there = [
            (arm, seed, numbers)
            for arm in case.config.arms
            for seed in seeds_of(case.config)
            if case.source(arm) is case
            if (numbers := read_numbers(path / "trials" / arm.name / f"seed-{seed}", arm)) is not None
        ]
        if not there:
            return
        self._put(case, there)
        environment = path / "environment.json"
        if is_there(environment):
            machine = read_object(environment)
            if problem := _machine_problem(machine):
                raise RunError(f"{environment} does not say on what a run was made: {problem}")
            self._made_on([machine])

    def take_in(self, sweeps: Sequence[Sweep], other: Results) -> int:
        """Add the trials of these sweeps that are finished in other results and not in these; returns how many."""
        count = 0
        asked = [
            (sweep, case.source(arm), arm, seed)
            for sweep in sweeps
            for case in sweep.cases
            for arm in case.config.arms
            for seed in seeds_of(case.config)
        ]
        for sweep, case, arm, seed in asked:
            numbers = other.trial(case, arm, seed) if self.trial(case, arm, seed) is None else None
            if numbers is not None:
                about = self.entries.setdefault(sweep.name, {"cases": {}})
                about["title"] = sweep.title
                self._put(case, [(arm, seed, numbers)])
                count += 1
        if count:
            self._made_on(other.environments)
        return count

    def _put(self, case: Case, trials: Sequence[tuple[Arm, int, Numbers]]) -> None:
        cases = self.entries[case.sweep]["cases"]
        if not self._case(case):
            config = case.config
            cases[case.name] = {
                "setting": case.setting,
                "rounds": config.rounds,
                "last": config.evaluation.last,
                "target": config.evaluation.goal(config.task.name != "tokens"),
                "arms": {},
            }
        for arm, seed, numbers in trials:
            entry = cases[case.name]["arms"].get(arm.name)
            if entry is None or not made_by(entry, arm):
                entry = cases[case.name]["arms"][arm.name] = {"seeds": {}}
            # Also into an entry that did not name the defaults: from here on they are known.
            entry |= maker_of(arm)
            entry["seeds"][str(seed)] = numbers

    def _made_on(self, machines: Sequence[dict[str, Any]]) -> None:
        self.environments += [machine for machine in machines if machine not in self.environments]

    def _case(self, case: Case) -> Mapping[str, Any]:
        entry: Mapping[str, Any] = self.entries.get(case.sweep, {}).get("cases", {}).get(case.name, {})
        return entry if entry.get("setting") == case.setting else {}


def load_sweep(path: str | Path) -> Results:
    """The numbers of a sweep's folder, as `safari sweep --out` has it; RunError where it holds none."""
    if not is_there(Path(path) / FILE):
        raise RunError(f"{path} holds no {FILE}")
    return Results.open(Path(path))


def versions(trials: Mapping[int, Numbers]) -> set[str]:
    """The versions of the code that made these trials."""
    return {version for numbers in trials.values() for version in numbers.get("code") or [UNKNOWN]}


def column(trials: Mapping[int, Numbers], name: str) -> dict[str, Any]:
    """Mean, sample standard deviation and n of a column over the seeds that have it.

    >>> column({0: {"top1": 0.5}, 1: {"top1": 0.7}, 2: {"top1": None}}, "top1")["n"]
    2
    """
    return spread([t[name] for t in trials.values() if t.get(name) is not None])


def trials_by_version(sweeps: Sequence[Sweep], results: Results) -> dict[str, int]:
    """Number of finished trials by version of the code; a trial of several versions counts for each."""
    counts: dict[str, int] = {}
    for sweep in sweeps:
        for case in sweep.cases:
            for arm in case.config.arms:
                for seed, numbers in results.arm(case, arm).items():
                    for version in versions({seed: numbers}):
                        counts[version] = counts.get(version, 0) + 1
    return counts


def several_versions(sweeps: Sequence[Sweep], results: Results) -> str:
    """A sentence where the finished trials are of more than one version of the code; otherwise nothing."""
    counts = trials_by_version(sweeps, results)
    if len(counts) < 2:
        return ""
    texts = [f"{version} ({n} trials)" for version, n in sorted(counts.items(), key=lambda pair: -pair[1])]
    return f"These trials were made by {len(counts)} versions of the code: {', '.join(texts)}."


def _problem(table: Mapping[str, Any]) -> str:
    """First deviation of a table from what `Results.save` writes; empty where there is none."""
    machines = table.get("environments")
    if not isinstance(machines, list) or not all(isinstance(machine, dict) for machine in machines):
        return "environments must be a list of tables"
    if problem := next((found for machine in machines if (found := _machine_problem(machine))), ""):
        return f"environments: {problem}"
    # Tables in tables, from sweeps down to the numbers of a seed.
    level: list[tuple[str, Any]] = [("experiments", table.get("experiments"))]
    for inside in ("cases", "arms", "seeds", None):
        for name, entries in level:
            if not isinstance(entries, dict) or not all(isinstance(e, dict) for e in entries.values()):
                return f"{name} must be a table of tables"
        tables = [(visible(key, 60), entry) for _, entries in level for key, entry in entries.items()]
        if inside == "arms" and not all(isinstance(entry.get("setting"), str) for _, entry in tables):
            return "every case must have a setting, a text"
        if inside == "seeds" and (problem := _first((f"arm {a}", maker_problem(e)) for a, e in tables)):
            return problem
        if inside is not None:
            level = [(f"{inside} of {key}", entry.get(inside)) for key, entry in tables]
    return _first((f"seed {seed}", problem_of(numbers)) for seed, numbers in tables)


def _first(found: Iterable[tuple[str, str]]) -> str:
    """The first problem, with where it is; empty where there is none."""
    return next((f"{where}: {problem}" for where, problem in found if problem), "")


def _machine_problem(machine: Mapping[str, Any]) -> str:
    """First text about a machine that no page can hold; lone surrogates inside of lists are escaped there."""
    for key, value in machine.items():
        named = visible(key, 60)
        texts = (key, value) if isinstance(value, str) else (key,)
        if problem := next((found for text in texts if (found := text_problem(named, text))), ""):
            return problem
    return ""
