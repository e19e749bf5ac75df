"""Limits of options: each check returns the value, or raises a ConfigError that names option, limit and value."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import TypeVar

from safari.errors import ConfigError, brief

Number = TypeVar("Number", int, float)


def at_least(name: str, value: Number, least: float, *, finite: bool = False) -> Number:
    """The value, when it is at least the limit; `finite`: and not infinite.

    >>> at_least("interval", 0, 1)
    Traceback (most recent call last):
        ...
    safari.errors.ConfigError: interval must be at least 1, got 0
    """
    if not value >= least or (finite and math.isinf(value)):
        kind = "a finite number of " if finite else ""
        raise ConfigError(f"{name} must be {kind}at least {_text(least)}, got {brief(value)}")
    return value


def at_most(name: str, value: Number, most: Number) -> Number:
    """The value, when it is at most the limit."""
    if not value <= most:
        raise ConfigError(f"{name} must be at most {_text(most)}, got {brief(value)}")
    return value


def above(name: str, value: float, limit: float) -> float:
    """The value, when it is a finite number above the limit."""
    if not limit < value < math.inf:
        raise ConfigError(f"{name} must be a finite number above {_text(limit)}, got {brief(value)}")
    return value


def within(name: str, value: Number, least: float, most: float) -> Number:
    """The value, when it lies between two limits, or is one of them."""
    if not least <= value <= most:
        raise ConfigError(f"{name} must lie between {_text(least)} and {_text(most)}, got {brief(value)}")
    return value


def below(name: str, value: float, limit: float) -> float:
    """The value, when it is at least 0 and below the limit."""
    if not 0 <= value < limit:
        raise ConfigError(f"{name} must be at least 0 and below {_text(limit)}, got {brief(value)}")
    return value


def positive_share(name: str, value: float) -> float:
    """The value, when it is above 0 and at most 1."""
    if not 0 < value <= 1:
        raise ConfigError(f"{name} must be above 0 and at most 1, got {brief(value)}")
    return value


def path_of(name: str, text: str) -> Path:
    """The path that an option names, when the system can look there. Whether anything is there is not asked.

    >>> path_of("file", "no/such/file")
    PosixPath('no/such/file')
    >>> path_of("file", "null\\0")
    Traceback (most recent call last):
        ...
    safari.errors.ConfigError: file must be a path that can be looked at, got 'null\\x00': embedded null byte
    """
    try:
        path = Path(text).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            # With the dot a folder is looked into, and not only at.
            os.stat(os.path.join(path, "."))  # noqa: PTH116, PTH118
    # ValueError: a null character; RuntimeError: the home of somebody unknown.
    except (OSError, ValueError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{name} must be a path that can be looked at, got {brief(text)}: {why}") from error
    return path


def _text(limit: float) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)
