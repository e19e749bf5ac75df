"""A table of a file held against the fields of a dataclass: what fits, and a line for what does not."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from safari.errors import brief, did_you_mean, not_there
from safari.plugins import fits, spell, type_hints


def fitting(cls: type, table: Mapping[str, Any], prefix: str, problems: list[str]) -> dict[str, Any]:
    """The table's values that fit the class; what does not, and what is missing, is a problem.

    >>> @dataclasses.dataclass
    ... class Dot:
    ...     x: float
    ...     y: float
    >>> problems = []
    >>> fitting(Dot, {"x": 1, "z": 2}, "dot.", problems), problems
    ({'x': 1}, ['dot.z is not a field', 'dot.y is required'])
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    found = {}
    for key, value in known(table, fields, prefix, problems).items():
        hint = hint_of(cls, key)
        if fits(value, hint):
            found[key] = value
        else:
            problems.append(f"{prefix}{key} must be {_spell(hint)}, got {brief(value)}")
    for key, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and key not in table:
            problems.append(f"{prefix}{key} is required")
    return found


def known(table: Mapping[str, Any], names: Iterable[str], prefix: str, problems: list[str]) -> dict[str, Any]:
    """The entries with these names; the others are problems."""
    names = list(names)
    problems += not_there(
        prefix.rstrip(".") or "the sweep",
        [f"{prefix}{key}" for key in table if key not in names],
        lambda name: f"is not a field{did_you_mean(name[len(prefix) :], names)}",
    )
    return {key: value for key, value in table.items() if key in names}


def misfits(cls: type, table: Mapping[str, Any], prefix: str) -> list[str]:
    """A line for each value that does not fit the class' field of that name."""
    hints = {key: hint_of(cls, key) for key in table}
    return [
        f"{prefix}{key} must be {_spell(hints[key])}, got {brief(value)}"
        for key, value in table.items()
        if not fits(value, hints[key])
    ]


def hint_of(cls: type, key: str) -> Any:
    """A field's type, as `fits` knows it: a table is a dict; an optional field that is there is not None."""
    hint = type_hints(cls)[key]
    if typing.get_origin(hint) is Mapping:
        return dict
    args = typing.get_args(hint)
    return next(arg for arg in args if arg is not type(None)) if type(None) in args else hint


def _spell(hint: Any) -> str:
    return "a table" if hint is dict else spell(hint)
