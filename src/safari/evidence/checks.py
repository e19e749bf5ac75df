"""What an experiment's numbers must come to, and every way to ask for what cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from safari.config import Config
from safari.errors import one_of
from safari.evidence.fields import fitting
from safari.evidence.numbers import COLUMNS, is_share
from safari.runs.summary import AVERAGE_COLUMNS


@dataclass(frozen=True)
class Check:
    """A claim as arithmetic: a column of an arm, alone or seed by seed against another arm.

    `at_least`: the mean reaches this. `margin`: the mean is at most so far below that of `against`. `times`:
    the mean is at most so many times that of `against`. `first`: of all ranked arms it is the best, or within
    one standard error of it. Every case (or those of `cases`) must pass.
    """

    says: str
    arm: str
    column: str = "top1"
    against: str = ""
    at_least: float | None = None
    margin: float | None = None
    times: float | None = None
    first: bool | None = None
    cases: tuple[str, ...] = ()

    def is_about(self, case: str) -> bool:
        """Whether a case must pass it."""
        return not self.cases or case in self.cases


def read_check(item: object, number: int, problems: list[str]) -> Check | None:
    """A table of `[[checks]]`; None, and a line for each thing that is wrong with it by itself."""
    where = f"checks[{number}]"
    if not isinstance(item, Mapping):
        problems.append(f"{where} must be a table, got {item!r}")
        return None
    before = len(problems)
    fields = fitting(Check, item, f"{where}.", problems)
    bounds = [key for key in ("at_least", "margin", "times", "first") if key in fields]
    if len(problems) == before and len(bounds) != 1:
        problems.append(
            f"{where} must have one of at_least, margin, times and first, got {', '.join(bounds) or 'none'}"
        )
    if len(problems) == before and (bounds[0] in ("margin", "times")) != bool(fields.get("against")):
        problems.append(f"{where}: margin and times need against, the others do without")
    column = fields.get("column", "top1")
    if column not in COLUMNS:
        problems.append(one_of(f"{where}.column", column, COLUMNS))
    elif is_share(column) and not 0 <= fields.get("at_least", 0) <= 1:
        problems.append(
            f"{where}.at_least must lie between 0 and 1, because {column} is a fraction; "
            f"got {fields['at_least']}"
        )
    if len(problems) > before:
        return None
    return Check(**{**fields, "cases": tuple(fields.get("cases", ()))})


def wrong_cases(checks: Sequence[Check], cases: Mapping[str, Config]) -> list[str]:
    """Cases that no check can name, because there is none so called; and columns of the running average,
    where a case that the check is about keeps none."""
    without = [
        f"checks[{k}].column is {check.column}, and aggregation.average is 0 in case {name}"
        for k, check in enumerate(checks)
        for name, config in cases.items()
        if check.column in AVERAGE_COLUMNS and not config.aggregation.average and check.is_about(name)
    ]
    return without + [
        one_of(f"checks[{k}].cases", name, cases)
        for k, check in enumerate(checks)
        for name in check.cases
        if name not in cases
    ]


def wrong_arms(
    checks: Sequence[Check], unranked: Sequence[str], arms: Mapping[str, set[str]], rules: Iterable[str]
) -> list[str]:
    """Arms that none of the cases in question has; `arms` holds those of each case.

    What is not ranked may also be one of the `rules` that only --set brings in.
    """
    found = list[str]()
    for k, check in enumerate(checks):
        known = {arm for case, there in arms.items() if check.is_about(case) for arm in there}
        named = {"arm": check.arm} | ({"against": check.against} if check.against else {})
        found += [one_of(f"checks[{k}].{key}", arm, known) for key, arm in named.items() if arm not in known]
    everywhere = {*rules, *(arm for there in arms.values() for arm in there)}
    return found + [one_of("unranked", arm, everywhere) for arm in unranked if arm not in everywhere]
