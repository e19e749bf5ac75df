"""The checks of an experiment's numbers, and the errors of checks that make no sense."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from safari.config import Config
from safari.errors import brief, one_of
from safari.sweep.fields import fitting
from safari.sweep.numbers import COLUMNS, is_share

# As `against`: every other ranked arm of the case.
EVERY_RIVAL = "*"
_BOUNDS = ("at_least", "margin", "within", "times")


@dataclass(frozen=True)
class Check:
    """A claim as a statement about means over seeds, which a test can show or refute.

    `against` is an arm of the same case, `CASE/ARM` for that of a certain case, or `*`: every other ranked
    arm. `at_least`: the mean reaches this. `margin`: the mean is at most this far behind that of `against`;
    below 0: at least this far ahead. `within`: it is at most this far away from it, in either direction.
    `times`: it is at most this multiple of that of `against`. It must hold in every case, or in those of
    `cases`.
    """

    says: str
    arm: str
    column: str = "top1"
    against: str = ""
    at_least: float | None = None
    margin: float | None = None
    within: float | None = None
    times: float | None = None
    cases: tuple[str, ...] = ()

    def is_about(self, case: str) -> bool:
        """Whether the check must hold in a case."""
        if self.against == f"{case}/{self.arm}":
            return False
        return not self.cases or case in self.cases


def read_check(item: object, number: int, problems: list[str]) -> Check | None:
    """A table of `[[checks]]`; None, and a line for each thing that is wrong with it by itself."""
    where = f"checks[{number}]"
    if not isinstance(item, Mapping):
        problems.append(f"{where} must be a table, got {brief(item)}")
        return None
    before = len(problems)
    fields = fitting(Check, item, f"{where}.", problems)
    bounds = [key for key in _BOUNDS if key in fields]
    if len(problems) == before and len(bounds) != 1:
        problems.append(
            f"{where} must have one of at_least, margin, within and times, got {', '.join(bounds) or 'none'}"
        )
    if len(problems) == before and (bounds[0] != "at_least") != bool(fields.get("against")):
        problems.append(f"{where}: margin, within and times need against, at_least does without")
    column = fields.get("column", "top1")
    if column not in COLUMNS:
        problems.append(one_of(f"{where}.column", column, COLUMNS))
    elif len(problems) == before:
        problems += [f"{where}.{line}" for line in _wrong_bound(bounds[0], fields[bounds[0]], column)]
    if len(problems) > before:
        return None
    return Check(**{**fields, "cases": tuple(fields.get("cases", ()))})


def _wrong_bound(name: str, value: float, column: str) -> list[str]:
    """Problems of the number that a check compares with."""
    if not math.isfinite(value):
        return [f"{name} must be finite, got {value}"]
    if name == "within" and value <= 0:
        return [f"within must be above 0, got {value}"]
    if not is_share(column) or name == "times":
        return []
    if name == "at_least" and not 0 <= value <= 1:
        return [f"at_least must lie between 0 and 1, because {column} is a fraction; got {value}"]
    # A 1 is meant as a point; as a fraction the claim would always hold.
    if name in ("margin", "within") and not -1 < value < 1:
        least = "0" if name == "within" else "-1"
        return [
            f"{name} must lie between {least} and 1, because {column} is a fraction (a point is 0.01); "
            f"got {value}"
        ]
    return []


def wrong_cases(checks: Sequence[Check], cases: Mapping[str, Config]) -> Iterator[str]:
    """Cases that do not exist, and columns of the running average where a case keeps none.

    One by one: in a large file that is wrong throughout, the first ones are reported.
    """
    for k, check in enumerate(checks):
        if check.column.startswith("average_"):
            for name, config in cases.items():
                if not config.aggregation.average and check.is_about(name):
                    yield f"checks[{k}].column is {check.column}, and aggregation.average is 0 in case {name}"
    for k, check in enumerate(checks):
        for field, names in (("cases", check.cases), ("against", _case_of(check))):
            yield from (one_of(f"checks[{k}].{field}", name, cases) for name in names if name not in cases)


def wrong_arms(checks: Sequence[Check], arms: Mapping[str, set[str]]) -> Iterator[str]:
    """Arms that none of the cases in question has, one by one; `arms` holds those of each case."""
    for k, check in enumerate(checks):
        known = {arm for case, there in arms.items() if check.is_about(case) for arm in there}
        if check.arm not in known:
            yield one_of(f"checks[{k}].arm", check.arm, known)
        case, _, other = check.against.rpartition("/")
        there = arms[case] if case else known
        if other not in ("", EVERY_RIVAL) and other not in there:
            yield one_of(f"checks[{k}].against", other, there)


def _case_of(check: Check) -> tuple[str, ...]:
    case = check.against.rpartition("/")[0]
    return (case,) if case else ()
