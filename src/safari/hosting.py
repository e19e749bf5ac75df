"""Code that is not ours: its errors become one line, with the field that named it and its place."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from safari.errors import ConfigError, DataError, SafariError

T = TypeVar("T")

_PACKAGE = Path(__file__).resolve().parent


def sheltered(where: str, call: Callable[[], T]) -> T:
    """Run a user's code; any error in it becomes a ConfigError that says where."""
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
        raise type(error)([f"{field}: {problem}" for problem in error.problems]) from error


def hosted(where: str, call: Callable[[], T]) -> T:
    """Both: run a user's code, and let every problem in it begin with the same words."""
    return sheltered(where, lambda: named(where, call))


def _is_out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.cuda.OutOfMemoryError)


def _place(error: BaseException) -> str:
    """Line of the user's file that raised an error, without the page of frames around it."""
    frames = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__) if line
    ]
    theirs = [frame for frame in frames if _PACKAGE not in Path(frame[0]).parents]
    if not theirs:
        return ""
    file, line = [frame for frame in theirs if frame[0] == theirs[0][0]][-1]
    return f" ({Path(file).name}, line {line})"
