"""results.json: the numbers of every trial that ever finished, in one small file that can be carried away.

A trial in the book is finished even where its run's folder is not: a new machine begins where the last one
stopped, and the report needs nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safari.config import Arm
from safari.errors import RunError
from safari.evidence.numbers import Numbers, made_by, maker_of, read_numbers
from safari.evidence.plan import Case, Experiment, digest
from safari.runs import seeds_of, spread
from safari.runs.files import making, write_atomically

FILE = "results.json"
FORMAT = "safari-evidence-1"


def identity(case: Case, arm: Arm, seed: int) -> tuple[str, str, int]:
    """What makes a trial the same, whoever asks for it: the setting, the rule as it is today, the seed."""
    return digest(case.home(arm).config), json.dumps(maker_of(arm), sort_keys=True), seed


@dataclass
class Book:
    """The entries by experiment, case, arm and seed; `environments` are the machines that made them."""

    entries: dict[str, Any]
    environments: list[dict[str, Any]]

    @classmethod
    def open(cls, out: Path) -> Book:
        """The book of an output folder; an empty one where there is none."""
        path = out / FILE
        if not path.exists():
            return cls({}, [])
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            if table["format"] != FORMAT:
                raise RunError(f"{path}: format must be {FORMAT}, got {table['format']!r}")
            return cls(table["experiments"], table["environments"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} is not a book of results: {error!r}") from error

    def save(self, out: Path) -> None:
        """Write it, whole."""
        table = {"format": FORMAT, "environments": self.environments, "experiments": self.entries}
        with making(out):
            write_atomically(out / FILE, (json.dumps(table, separators=(",", ":")) + "\n").encode())

    def trial(self, case: Case, arm: Arm, seed: int) -> Numbers | None:
        """A finished trial's numbers: of this setting and with this rule, whoever asked for them, or none."""
        home = case.home(arm)
        setting = digest(home.config)[:12]
        for about in self.entries.values():
            for entry in about["cases"].values():
                if entry["setting"] != setting:
                    continue
                for found in entry["arms"].values():
                    if str(seed) in found["seeds"] and made_by(found, arm):
                        numbers: Numbers = found["seeds"][str(seed)]
                        return numbers
        return None

    def arm(self, case: Case, arm: Arm) -> dict[int, Numbers]:
        """The finished seeds of an arm, of those that the case asks for."""
        found = {seed: self.trial(case, arm, seed) for seed in seeds_of(case.config)}
        return {seed: numbers for seed, numbers in found.items() if numbers is not None}

    def progress(self, experiments: Sequence[Experiment]) -> tuple[int, int]:
        """How many trials are finished, and how many are asked for; one that several ask for counts once."""
        asked = {
            identity(case, arm, seed): self.trial(case, arm, seed) is not None
            for e in experiments
            for case in e.cases
            for arm in case.config.arms
            for seed in seeds_of(case.config)
        }
        return sum(asked.values()), len(asked)

    def gather(self, experiment: Experiment, out: Path) -> None:
        """Take in what the run folders have; a setting that has changed since begins a new entry."""
        about = self.entries.setdefault(experiment.name, {"cases": {}})
        about |= {"title": experiment.title, "claim": experiment.claim, "finding": experiment.finding}
        for case in experiment.cases:
            self._gather_case(case, out / case.experiment / case.folder)

    def _gather_case(self, case: Case, path: Path) -> None:
        there = [
            (arm, seed, numbers)
            for arm in case.config.arms
            for seed in seeds_of(case.config)
            if case.home(arm) is case
            if (numbers := read_numbers(path / "trials" / arm.name / f"seed-{seed}", arm)) is not None
        ]
        if not there:
            return
        cases = self.entries[case.experiment]["cases"]
        if not self._case(case):
            config = case.config
            cases[case.name] = {
                "setting": digest(config)[:12],
                "rounds": config.rounds,
                "last": config.evaluation.last,
                "target": config.evaluation.target,
                "arms": {},
            }
        for arm, seed, numbers in there:
            entry = cases[case.name]["arms"].get(arm.name)
            if entry is None or not made_by(entry, arm):
                entry = cases[case.name]["arms"][arm.name] = {"seeds": {}}
            # Also into an entry that did not name the defaults: from here on they are known.
            entry |= maker_of(arm)
            entry["seeds"][str(seed)] = numbers
        environment = path / "environment.json"
        if environment.exists():
            made_with = json.loads(environment.read_text(encoding="utf-8"))
            self.environments += [made_with] if made_with not in self.environments else []

    def _case(self, case: Case) -> Mapping[str, Any]:
        entry: Mapping[str, Any] = self.entries.get(case.experiment, {}).get("cases", {}).get(case.name, {})
        return entry if entry.get("setting") == digest(case.config)[:12] else {}


def column(trials: Mapping[int, Numbers], name: str) -> dict[str, Any]:
    """Mean, sample standard deviation and n of a column over the seeds that have it.

    >>> column({0: {"top1": 0.5}, 1: {"top1": 0.7}, 2: {"top1": None}}, "top1")["n"]
    2
    """
    return spread([t[name] for t in trials.values() if t.get(name) is not None])
