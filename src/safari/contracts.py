"""Checks of what functions of parts return: each gives the answer, or raises ConfigError with what it must be.

They look at types and shapes alone, so that none of them waits for a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from safari.errors import ConfigError


def pair(function: str, form: str, found: Any, first: type | None = None) -> tuple[Any, Any]:
    """An answer of two things, the first of them perhaps of a certain type."""
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], first or object):
        raise ConfigError(f"{function} must return {form}, got {describe(found)}")
    return found


def tensor(function: str, found: Any, shape: Sequence[int]) -> Tensor:
    """A tensor of this shape."""
    if not isinstance(found, Tensor) or found.shape != tuple(shape):
        raise ConfigError(f"{function} must return a tensor of shape {[*shape]}, got {describe(found)}")
    return found


def tensors(what: str, found: Any) -> dict[str, Tensor]:
    """Tensors by name: a state that a checkpoint can hold.

    >>> tensors("the state that init returns", {"n": 3})
    Traceback (most recent call last):
    ...
    safari.errors.ConfigError: the state that init returns must hold tensors by name, got an int as 'n'
    """
    if not isinstance(found, Mapping):
        raise ConfigError(f"{what} must be a dict, got {describe(found)}")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ConfigError(f"{what} must hold tensors by name, got {describe(value)} as {name!r}")
    return dict(found)


def arrays(what: str, found: Any) -> dict[str, np.ndarray]:
    """Arrays of numbers by name: a link's state that a checkpoint can hold."""
    if not isinstance(found, Mapping):
        raise ConfigError(f"{what} must be a dict, got {describe(found)}")
    for name, value in found.items():
        numeric = isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative
        if not isinstance(name, str) or not numeric:
            raise ConfigError(
                f"{what} must hold numpy arrays of numbers by name, got {describe(value)} as {name!r}"
            )
    return dict(found)


def rows(what: str, found: Any, clients: int, ndim: int | None = None) -> dict[str, Tensor]:
    """Tensors by name with a row for each client, of so many dimensions where that is said."""
    named = tensors(what, found)
    for name, value in named.items():
        if value.ndim == 0 or len(value) != clients or value.ndim != (ndim or value.ndim):
            row = "row of numbers" if ndim else "row"
            raise ConfigError(
                f"{what} must have a {row} for each client that it is called for, {clients} here, "
                f"got {describe(value)} as {name!r}"
            )
    return named


def describe(thing: Any) -> str:
    """Shapes rather than a page of numbers: what something is, in few words.

    >>> describe((np.zeros(2), None))
    'a tuple of an array of float64 and shape [2] and None'
    """
    if isinstance(thing, Tensor):
        return f"a tensor of shape {[*thing.shape]}"
    if isinstance(thing, np.ndarray):
        return f"an array of {thing.dtype} and shape {[*thing.shape]}"
    if thing is None:
        return "None"
    if isinstance(thing, tuple) and 0 < len(thing) < 4:
        return f"a tuple of {' and '.join(describe(part) for part in thing)}"
    kind = type(thing).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
