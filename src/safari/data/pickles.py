"""Reads pickles that hold nothing but plain values and uint8 arrays, without unpickling them.

A pickle is a program for a stack machine: it may name any function and call it. This is a machine of our own
that knows the instructions with which dictionaries, lists, numbers, texts and numpy arrays are written. A
name is a pair of texts here, and the few calls that arrays consist of are carried out by this file: nothing
is looked up, imported or called because the file says so. Every instruction costs about as much as the bytes
it was read from, and their number is limited.
"""

from __future__ import annotations

import io
import math
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from safari.errors import DataError

# The official files have about 30,000.
MOST_INSTRUCTIONS = 250_000
MOST_DIMENSIONS = 4
MOST_LETTERS = 200
# How much of a text from the file an error shows.
_SHOWN = 60
_LARGEST = 2**63


def load_arrays(raw: bytes, source: str) -> dict[str, Any]:
    """The dictionary in the pickle `raw`: names to plain values, lists of them, and uint8 arrays.

    Strings that Python 2 wrote come out as bytes, except for the names.

    >>> import pickle
    >>> load_arrays(pickle.dumps({b"data": np.arange(3, dtype=np.uint8), b"labels": [1, 2]}), "a file")
    {'data': array([0, 1, 2], dtype=uint8), 'labels': [1, 2]}
    >>> load_arrays(pickle.dumps(print), "a file")
    Traceback (most recent call last):
    safari.errors.DataError: a file: not a pickle of plain values and uint8 arrays: refused the name
    builtins.print
    """
    try:
        found = _Machine(raw).run()
        if not isinstance(found, dict):
            raise _RefusedError(f"expected a dict, found {_kind(found)}")
        return {_text(key): _plain(value) for key, value in found.items()}
    # `pickletools` raises a ValueError on bytes that are no instructions, the memo a KeyError.
    except (_RefusedError, ValueError, KeyError) as error:
        what = _safe(str(error), 4 * _SHOWN) or type(error).__name__
        raise DataError(f"{source}: not a pickle of plain values and uint8 arrays: {what}") from error


class _RefusedError(Exception):
    pass


@dataclass(frozen=True)
class _Name:
    """A function or class that the pickle mentions."""

    module: str
    name: str


class _Uint8:
    """The only dtype there is."""


class _Array:
    """An array; it has no value until its state is set."""

    def __init__(self, value: npt.NDArray[np.uint8] | None = None):
        self.value = value


_BYTES = ("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8")
_OLD_STRINGS = ("STRING", "SHORT_BINSTRING", "BINSTRING")
_TEXTS = ("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_NUMBERS = ("INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT")
_IGNORED = ("PROTO", "FRAME", "STOP")


class _Machine:
    def __init__(self, raw: bytes):
        self._raw = raw
        self._stack: list[Any] = []
        # Where on the stack the groups begin that are still open.
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        # How many bytes calls may still make of texts: together no more than the file has.
        self._room = len(raw)

    def run(self) -> Any:
        """Whatever the program leaves on the stack."""
        for count, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(self._raw))):
            if count >= MOST_INSTRUCTIONS:
                raise _RefusedError(f"at most {MOST_INSTRUCTIONS} instructions are read")
            name = opcode.name
            if name in _VALUES:
                self._stack.append(_VALUES[name](argument))
            elif name in _STEPS:
                _STEPS[name](self, argument)
            elif name not in _IGNORED:
                raise _RefusedError(f"refused the instruction {name}")
        return self._pop(1)[0]

    def _pop(self, count: int) -> list[Any]:
        """The last values, in the order in which they came; none from before the last mark."""
        first = len(self._stack) - count
        if first < (self._marks[-1] if self._marks else 0):
            raise _RefusedError("an instruction needs more values than there are")
        items = self._stack[first:]
        del self._stack[first:]
        return items

    def _pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise _RefusedError("a group ends that did not begin")
        return self._pop(len(self._stack) - self._marks.pop())

    def _tuple(self, size: int) -> None:
        self._stack.append(tuple(self._pop(size)))

    def _extend(self, items: list[Any]) -> None:
        self._top(list).extend(items)

    def _set(self, items: list[Any]) -> None:
        target = self._top(dict)
        if len(items) % 2:
            raise _RefusedError("a name without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_text(key)] = value

    def _top(self, kind: type) -> Any:
        (target,) = self._pop(1)
        if not isinstance(target, kind):
            raise _RefusedError(f"expected a {kind.__name__}, found {_kind(target)}")
        self._stack.append(target)
        return target

    def _reduce(self) -> None:
        function, arguments = self._pop(2)
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            raise _RefusedError(f"refused to call {_kind(function)}")
        call = _CALLS.get((function.module, function.name))
        if call is None:
            raise _RefusedError(f"refused to call {function.module}.{function.name}")
        made = call(*arguments[:4], *[None] * (4 - len(arguments)))
        if isinstance(made, bytes):
            self._room -= len(made)
            if self._room < 0:
                raise _RefusedError("its texts are longer together than the file")
        self._stack.append(made)

    def _build(self) -> None:
        target, state = self._pop(2)
        self._stack.append(target)
        if isinstance(target, _Uint8):
            # numpy writes byte order and layout here; a byte has neither.
            return
        if not isinstance(target, _Array):
            raise _RefusedError(f"refused to change {_kind(target)}")
        if not isinstance(state, tuple) or len(state) != 5:
            raise _RefusedError("an array's state must have 5 members")
        _version, shape, dtype, fortran, raw = state
        target.value = _array(raw, dtype, shape, "F" if fortran is True else "C")

    def _get(self, argument: Any) -> None:
        self._stack.append(self._memo[int(argument)])

    def _put(self, argument: Any) -> None:
        (value,) = self._pop(1)
        self._stack.append(value)
        self._memo[len(self._memo) if argument is None else int(argument)] = value

    def _named(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise _RefusedError("a name must be two texts")
        if (module, name) not in _NAMES:
            raise _RefusedError(f"refused the name {module}.{name}")
        self._stack.append(_Name(module, name))

    def _stack_global(self) -> None:
        self._named(*self._pop(2))


_VALUES: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        **dict.fromkeys(_BYTES, bytes),
        **dict.fromkeys(_OLD_STRINGS, lambda text: text.encode("latin1")),
        **dict.fromkeys(_TEXTS, str),
        **dict.fromkeys(_NUMBERS, lambda number: _bounded(number)),
        "NONE": lambda _: None,
        "NEWTRUE": lambda _: True,
        "NEWFALSE": lambda _: False,
        "EMPTY_TUPLE": lambda _: (),
        "EMPTY_LIST": lambda _: [],
        "EMPTY_DICT": lambda _: {},
    }
)


def _new_dict(machine: _Machine) -> None:
    items = machine._pop_to_mark()
    machine._stack.append({})
    machine._set(items)


_STEPS: Mapping[str, Callable[[_Machine, Any], object]] = MappingProxyType(
    {
        "MARK": lambda machine, _: machine._marks.append(len(machine._stack)),
        "LIST": lambda machine, _: machine._stack.append(machine._pop_to_mark()),
        "TUPLE": lambda machine, _: machine._stack.append(tuple(machine._pop_to_mark())),
        "TUPLE1": lambda machine, _: machine._tuple(1),
        "TUPLE2": lambda machine, _: machine._tuple(2),
        "TUPLE3": lambda machine, _: machine._tuple(3),
        "DICT": lambda machine, _: _new_dict(machine),
        "APPEND": lambda machine, _: machine._extend(machine._pop(1)),
        "APPENDS": lambda machine, _: machine._extend(machine._pop_to_mark()),
        "SETITEM": lambda machine, _: machine._set(machine._pop(2)),
        "SETITEMS": lambda machine, _: machine._set(machine._pop_to_mark()),
        "POP": lambda machine, _: machine._pop(1),
        **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), lambda m, argument: m._put(argument)),
        **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, argument: m._get(argument)),
        "GLOBAL": lambda machine, argument: machine._named(*argument.split(" ", 1)),
        "STACK_GLOBAL": lambda machine, _: machine._stack_global(),
        "REDUCE": lambda machine, _: machine._reduce(),
        "BUILD": lambda machine, _: machine._build(),
    }
)


def _array(raw: object, dtype: object, shape: object, order: object) -> npt.NDArray[np.uint8]:
    if not isinstance(dtype, _Uint8):
        raise _RefusedError("refused an array that is not of uint8")
    if not isinstance(raw, bytes):
        raise _RefusedError(f"an array must come as bytes, got {_kind(raw)}")
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise _RefusedError("an array's shape must be a tuple of sizes")
    if len(shape) > MOST_DIMENSIONS:
        raise _RefusedError(f"an array must have at most {MOST_DIMENSIONS} dimensions, got {len(shape)}")
    if math.prod(shape) != len(raw):
        raise _RefusedError(f"an array of shape {[*shape]} must have as many bytes, got {len(raw)}")
    return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if order in ("F", b"F") else "C")


def _dtype(kind: object, *_flags: object) -> _Uint8:
    if not isinstance(kind, str | bytes) or kind not in ("u1", b"u1", "|u1", b"|u1"):
        shown = kind if isinstance(kind, str | bytes) else _kind(kind)
        raise _RefusedError(f"refused an array that is not of uint8: dtype {shown[:_SHOWN]!r}")
    return _Uint8()


def _bytes_of(text: object, encoding: object, *_: object) -> bytes:
    # How Python 3 writes bytes into the protocols of Python 2.
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise _RefusedError("refused an encoding other than latin1")
    return text.encode("latin1")


_CALLS: Mapping[tuple[str, str], Callable[..., Any]] = MappingProxyType(
    {
        ("numpy", "dtype"): _dtype,
        ("_codecs", "encode"): _bytes_of,
        # numpy 2 moved its inner modules: files exist with either spelling.
        ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
        ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
        ("numpy.core.numeric", "_frombuffer"): lambda *state: _Array(_array(*state)),
        ("numpy._core.numeric", "_frombuffer"): lambda *state: _Array(_array(*state)),
    }
)
_NAMES = frozenset({("numpy", "ndarray"), *_CALLS})


def _bounded(number: float) -> float:
    if isinstance(number, int) and not -_LARGEST <= number < _LARGEST:
        raise _RefusedError("a whole number must have at most 64 bits")
    return number


def _text(key: object) -> str:
    if isinstance(key, str | bytes) and len(key) > MOST_LETTERS:
        raise _RefusedError(f"a name must have at most {MOST_LETTERS} letters, got {len(key)}")
    if isinstance(key, bytes):
        return key.decode("latin1")
    if not isinstance(key, str):
        raise _RefusedError(f"expected names as keys, found {_kind(key)}")
    return key


def _plain(value: Any) -> Any:
    if isinstance(value, _Array):
        if value.value is None:
            raise _RefusedError("an array without contents")
        return value.value
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, str | bytes | int | float | None):
            raise _RefusedError(f"expected plain values, lists of them and arrays, found {_kind(item)}")
    return value


def _kind(value: object) -> str:
    return type(value).__name__.lstrip("_")


def _safe(text: str, most: int) -> str:
    """A text from a file as an error may show it: printable, and not long."""
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:most])
    return shown + "..." * (len(text) > most)
