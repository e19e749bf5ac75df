"""Code that is not ours: plug-ins are built, called, and their errors turned into one line with field and name."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from safari.errors import ConfigError, DataError, SafariError, brief
from safari.plugins import check_call, check_options, resolve

T = TypeVar("T")

_PACKAGE = Path(__file__).resolve().parent


def sheltered(where: str, call: Callable[[], T]) -> T:
    """Run a user's code; whatever goes wrong in it is a ConfigError that says where."""
    try:
        return call()
    except (ConfigError, DataError, MemoryError):
        raise
    except SafariError as error:
        raise ConfigError(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:
        if isinstance(error, Exception) and _is_out_of_memory(error):
            # Memory is no mistake of the plug-in: an engine may try again with fewer clients at once.
            raise
        text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        raise ConfigError(f"{where} raised {text}{_place(error)}") from error


def named(field: str, make: Callable[[], T]) -> T:
    """Run a plug-in's own checks, and say in which table its problem lies."""
    try:
        return make()
    except ConfigError as error:
        raise ConfigError([f"{field}: {problem}" for problem in error.problems]) from error


def hosted(where: str, call: Callable[[], T]) -> T:
    """Both: run a user's code, and let every problem in it begin with the same words."""
    return sheltered(where, lambda: named(where, call))


def name_field(kind: str, field: str) -> str:
    """Where a config names the plug-in of a table.

    An arm's `name` is its own, what it plugs in is the rule; a step or a gate may be a bare name.
    """
    return field if kind in ("rule", "step", "gate") else f"{field}.name"


def factory_of(
    kind: str,
    field: str,
    name: str,
    options: Mapping[str, Any],
    builtin: Mapping[str, Any],
    positional: Sequence[str] = (),
) -> Callable[..., Any]:
    """The function behind a name in a config, when it takes these options and these arguments by position."""
    where = f"{name_field(kind, field)}: {name}"
    factory: Callable[..., Any] = resolve(kind, name_field(kind, field), name, builtin)
    if not callable(factory):
        raise ConfigError(f"{where} is not a function, got {brief(factory)}")
    problems = hosted(where, partial(check_options, field, factory, options, positional))
    if problems:
        raise ConfigError(problems)
    check_call(where, factory, positional, options)
    return factory


def made(kind: str, field: str, name: str, builtin: Mapping[str, Any], make: Callable[[], T]) -> T:
    """Run a plug-in's code, and say what went wrong in which table. A mistake in our own keeps its frames."""
    if name in builtin:
        return named(field, make)
    return hosted(f"{name_field(kind, field)}: {name}", make)


def build(
    kind: str,
    field: str,
    name: str,
    options: Mapping[str, Any],
    builtin: Mapping[str, Any],
    expected: type[T],
) -> T:
    """The part that a name and its options in a config stand for."""
    factory = factory_of(kind, field, name, options, builtin)
    found = made(kind, field, name, builtin, lambda: factory(**dict(options)))
    if not isinstance(found, expected):
        kind_of = expected.__name__
        raise ConfigError(f"{name_field(kind, field)}: {name} must return a {kind_of}, got {brief(found)}")
    return found


def _is_out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.cuda.OutOfMemoryError)


def _place(error: BaseException) -> str:
    """Where in the user's file it happened: the line to look at, without the page of frames around it."""
    frames = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__) if line
    ]
    theirs = [frame for frame in frames if _PACKAGE not in Path(frame[0]).parents]
    if not theirs:
        return ""
    file, line = [frame for frame in theirs if frame[0] == theirs[0][0]][-1]
    return f" ({Path(file).name}, line {line})"
