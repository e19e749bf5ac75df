"""Resolve a name in a config to an object, and list the options it takes.

A plug-in is a built-in's name, `package.module:object`, `path/to/file.py:object`, or what an installed
package offers under the entry-point group `safari.<kind>`. Its options are the keyword-only parameters of
the function: built-in or yours, they are checked and documented in the same way.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar, get_args, get_origin

from safari.errors import ConfigError, brief, did_you_mean, not_there, one_of
from safari.loading import load, loaded

T = TypeVar("T")

# TOML's whole numbers have no end in Python; from here on they have no float.
_BEYOND_FLOAT = 2**1023
# Of a class, by field; cached, because they would take a third of the time in which an experiment's cases are read.
type_hints = functools.cache(typing.get_type_hints)
# Arguments that a model may take by position besides the shape and the classes: see `named_arguments`.
_OFFERED = ("tokens", "labels")
# What was loaded from installed packages, by kind and name.
_from_entry_points: dict[tuple[str, str], Any] = {}


@dataclass(frozen=True)
class Option:
    """One keyword-only parameter of a plug-in."""

    name: str
    hint: Any
    default: Any


def resolve(kind: str, field: str, name: str, builtin: Mapping[str, Any]) -> Any:
    """The object behind a name; ConfigError with the allowed names and the nearest spelling otherwise.

    >>> resolve("rule", "arms", "dorp", {"drop": 1, "safari": 2})
    Traceback (most recent call last):
    ...
    safari.errors.ConfigError: arms must be one of drop, safari; got 'dorp' (did you mean 'drop'?); \
your own goes in as file.py:name or package.module:name
    """
    if name in builtin:
        return builtin[name]
    offered = {point.name: point for point in entry_points(group=f"safari.{kind}")}
    if name in offered:
        found = _load(field, f"entry point {name!r} ({offered[name].value})", offered[name].load)
        _from_entry_points[kind, name] = found
        return found
    if ":" not in name:
        raise ConfigError(
            one_of(field, name, {*builtin, *offered})
            + "; your own goes in as file.py:name or package.module:name"
            + (
                f", a data set of the Hugging Face hub, or a table in a file, as hf:{name}"
                if kind == "data"
                else ""
            )
        )
    source, _, attribute = name.rpartition(":")
    module = _load(field, source, lambda: load(source))
    if not hasattr(module, attribute):
        near = did_you_mean(attribute, vars(module))
        raise ConfigError(f"{field}: {source} has no {attribute!r}{near}")
    return getattr(module, attribute)


def known(kind: str, name: str, builtin: Mapping[str, Any]) -> Any:
    """The object behind a name as far as it is known without running anything; None where it is not.

    A built-in, or what this process has imported before: looking at a run must never import what it names.

    >>> known("rule", "drop", {"drop": 1}), known("rule", "evil.py:rule", {"drop": 1})
    (1, None)
    """
    if name in builtin:
        return builtin[name]
    source, _, attribute = name.rpartition(":")
    if not source:
        return _from_entry_points.get((kind, name))
    return getattr(loaded(source), attribute, None)


def options_of(factory: Callable[..., Any]) -> list[Option]:
    """A factory's options, in the order written.

    >>> def link(*, p: float = 0.3): ...
    >>> options_of(link)
    [Option(name='p', hint=<class 'float'>, default=0.3)]
    """
    hints = _hints(factory.__init__ if isinstance(factory, type) else factory)  # type: ignore[misc]
    return [
        Option(p.name, hints.get(p.name, Any), p.default)
        for p in inspect.signature(factory).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    ]


def defaults_of(factory: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are left as the factory has them today, as they come back from a file.

    >>> def rule(*, patience: float = 3.0, blocks: tuple[int, ...] = (1, 2), keep: float = 0.98): ...
    >>> defaults_of(rule, {"keep": 0.9})
    {'patience': 3.0, 'blocks': [1, 2]}
    """
    table = {}
    for option in options_of(factory):
        # What no file can hold says nothing in one either: an object's name may hold its address.
        with contextlib.suppress(TypeError, ValueError):
            if option.name not in given:
                table[option.name] = json.loads(json.dumps(option.default))
    return table


def _hints(function: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):  # a name imported for type checkers alone, or no function at all
        return {}


def check_options(
    field: str, factory: Callable[..., Any], options: Mapping[str, Any], positional: Sequence[str] = ()
) -> list[str]:
    """Problems with a plug-in's options, a line each: unknown names, wrong types, missing ones.

    >>> def prox(mu=0.1): ...
    >>> check_options("client", prox, {"mu": 0.2})
    ['client.mu must be an argument by name alone: write `def prox(*, mu=0.1)`']
    """
    known = {option.name: option for option in options_of(factory)}
    allowed = ", ".join(known) or "none"
    movable = _movable(factory, positional)

    def problem(path: str) -> str:
        name = path[len(field) + 1 :]
        if name in movable:
            return f"must be an argument by name alone: write `{_by_name(factory, movable)}`"
        return f"is not an option (allowed: {allowed}){did_you_mean(name, known)}"

    problems = not_there(field, [f"{field}.{name}" for name in options if name not in known], problem)
    problems += [
        f"{field}.{name} must be {spell(known[name].hint)}, got {brief(value)}"
        for name, value in options.items()
        if name in known and not fits(value, known[name].hint)
    ]
    missing = [
        o.name for o in known.values() if o.default is inspect.Parameter.empty and o.name not in options
    ]
    return problems + [f"{field}.{name} is required" for name in missing]


def check_call(
    where: str, factory: Callable[..., Any], positional: Sequence[str], options: Mapping[str, Any]
) -> None:
    """ConfigError when a factory cannot be called with these arguments by position and these options.

    >>> def link(p): ...
    >>> check_call("uplink.name: my.py:link", link, (), {})
    Traceback (most recent call last):
    ...
    safari.errors.ConfigError: uplink.name: my.py:link must take no arguments by position, \
and options by name alone, as in def link(*, p); missing a required argument: 'p'
    """
    try:
        inspect.signature(factory).bind(*positional, **options)
    except TypeError as error:
        taken = f"the arguments ({', '.join(positional)})" if positional else "no arguments"
        movable = _movable(factory, positional)
        example = f"def {_name(factory)}({', '.join([*positional, '*', 'p=0.3'])})"
        raise ConfigError(
            f"{where} must take {taken} by position, and options by name alone, "
            f"as in {_by_name(factory, movable) if movable else example}; {error}"
        ) from error


def _movable(factory: Callable[..., Any], positional: Sequence[str]) -> list[str]:
    """The names of arguments that could be options, were they given by name alone."""
    taken = [p for p in inspect.signature(factory).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return [p.name for p in taken[len(positional) :] if p.name not in _OFFERED]


def _by_name(factory: Callable[..., Any], movable: Sequence[str]) -> str:
    """A function's first line with these arguments by name alone."""
    parameters = inspect.signature(factory).parameters.values()
    plain = [p.replace(annotation=p.empty) for p in parameters]
    own = [p.replace(kind=p.KEYWORD_ONLY) if p.name in movable else p for p in plain]
    return f"def {_name(factory)}{inspect.Signature(sorted(own, key=lambda p: p.kind))}"


def _name(factory: Callable[..., Any]) -> str:
    return getattr(factory, "__name__", "f")


def named_arguments(factory: Callable[..., Any], **offered: Any) -> dict[str, Any]:
    """Which of the arguments on offer a factory names, apart from its options (which are keyword-only).

    >>> def model(shape, classes, tokens=0, *, labels=8): ...
    >>> named_arguments(model, tokens=65, labels="class")
    {'tokens': 65}
    """
    named = inspect.signature(factory).parameters
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    return {name: value for name, value in offered.items() if name in named and named[name].kind in kinds}


def fits(value: object, hint: Any) -> bool:
    """Does a TOML value suit a type hint? An int is a fine float; a bool is not a number.

    >>> fits(1, float), fits(True, int), fits([1, 0.3], float | Sequence[float]), fits("x", Literal["x", "y"])
    (True, False, True, True)
    """
    if hint is Any:
        return True
    origin, args = get_origin(hint), get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if hint is float:
        whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < _BEYOND_FLOAT
        return isinstance(value, float) or whole
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping)
    if origin in (list, tuple, Sequence) or hint in (list, tuple):
        inner = args[0] if args else Any
        return isinstance(value, list | tuple) and all(fits(item, inner) for item in value)
    return isinstance(value, hint) if isinstance(hint, type) else True


def spell(hint: Any) -> str:
    """A type hint in plain words.

    >>> spell(float | Sequence[float])
    'a number or a list (each a number)'
    """
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Any: "anything"}
    origin, args = get_origin(hint), get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(spell(arg) for arg in args)
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(str(arg) for arg in args)
    if origin in (dict, Mapping):
        return "a table"
    if origin in (list, tuple, Sequence) or hint in (list, tuple):
        return f"a list (each {spell(args[0])})" if args else "a list"
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def first_line(thing: Any) -> str:
    """The first line of a plug-in's docstring: what `safari list` prints."""
    doc = inspect.getdoc(getattr(thing, "score", thing)) or ""
    return doc.split("\n", 1)[0]


def _load(field: str, source: str, load: Callable[[], T]) -> T:
    """Run a user's code for the first time: its errors name the field of the config."""
    try:
        return load()
    except ConfigError as error:
        raise type(error)([f"{field}: {problem}" for problem in error.problems]) from error
    except (Exception, SystemExit) as error:
        # A script that ends the process, such as one with its main part at the top level, must not do so unheard.
        raise ConfigError(f"{field}: cannot import {source}: {type(error).__name__}: {error}") from error
