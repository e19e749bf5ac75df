"""Reads pickles that hold nothing but plain values and uint8 arrays.

A pickle is a program: it may name any function and call it. Here every name that numpy's arrays need leads to
a stand-in of ours, and every other name is refused, so that no code outside this file runs; not even numpy's
own `__setstate__`, which trusts what it is given.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from safari.errors import DataError


def load_arrays(raw: bytes, source: str) -> dict[str, Any]:
    """The dictionary in the pickle `raw`: names to plain values and uint8 arrays, as the CIFAR files hold.

    Strings that Python 2 wrote come out as bytes, except for the names.

    >>> load_arrays(pickle.dumps({b"data": np.arange(3, dtype=np.uint8), b"labels": [1, 2]}), "a file")
    {'data': array([0, 1, 2], dtype=uint8), 'labels': [1, 2]}
    >>> load_arrays(pickle.dumps(print), "a file")
    Traceback (most recent call last):
    safari.errors.DataError: a file: not a pickle of plain values and uint8 arrays: refused the name
    builtins.print
    """
    try:
        _refuse_bombs(raw)
        found = _Unpickler(io.BytesIO(raw), fix_imports=False, encoding="bytes").load()
        if not isinstance(found, dict):
            raise pickle.UnpicklingError(f"expected a dict, found {type(found).__name__}")
        return {_text(key): _plain(value) for key, value in found.items()}
    # A damaged pickle may raise nearly anything: the stack machine meets whatever the bytes say.
    except Exception as error:
        what = str(error) or type(error).__name__
        raise DataError(f"{source}: not a pickle of plain values and uint8 arrays: {what}") from error


def _refuse_bombs(raw: bytes) -> None:
    """Refuses what would make the unpickler allocate far more than the file holds.

    Its memo is as long as the highest index that a pickle mentions, and writers count up from 0 or 1. Sizes
    that point behind the end of the file raise here too, before anything is allocated for them.
    """
    for count, (opcode, argument, _) in enumerate(pickletools.genops(raw)):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > count:
            raise pickle.UnpicklingError(f"memo index {argument} after {count} opcodes")


class _Stand:
    """The only kind of object a pickle can call or set state on; its state can never be replaced."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]):
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("refused to change a function")


class _Uint8:
    """Stands for the only dtype there is."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        # numpy writes byte order and layout here; a byte has neither.
        pass


class _Array:
    """Stands for an array until the pickle has been read."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: npt.NDArray[np.uint8] | None = None

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise pickle.UnpicklingError("an array's state must have 5 members")
        _version, shape, dtype, fortran, raw = state
        self.value = _array(raw, dtype, shape, "F" if fortran else "C")


def _array(raw: object, dtype: object, shape: object, order: object) -> npt.NDArray[np.uint8]:
    if not isinstance(dtype, _Uint8):
        raise pickle.UnpicklingError("refused an array that is not of uint8")
    if not isinstance(raw, (bytes, bytearray)):
        raise pickle.UnpicklingError(f"an array must come as bytes, got {type(raw).__name__}")
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise pickle.UnpicklingError("an array's shape must be a tuple of sizes")
    if math.prod(shape) != len(raw):
        raise pickle.UnpicklingError(f"an array of shape {[*shape]} must have as many bytes, got {len(raw)}")
    flat = np.frombuffer(raw, np.uint8)
    return flat.reshape(shape, order="F" if order in ("F", b"F") else "C")


def _dtype(kind: object, *_copy_flags: object) -> _Uint8:
    if kind not in ("u1", b"u1", "|u1", b"|u1"):
        raise pickle.UnpicklingError(f"refused an array that is not of uint8: dtype {kind!r}")
    return _Uint8()


def _bytes_of(text: object, encoding: object) -> bytes:
    # How Python 3 writes bytes into the protocols of Python 2.
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError("refused an encoding other than latin1")
    return text.encode("latin1")


def _frombuffer(raw: object, dtype: object, shape: object, order: object) -> _Array:
    array = _Array()
    array.value = _array(raw, dtype, shape, order)
    return array


def _no_call(*_args: object) -> Any:
    raise pickle.UnpicklingError("refused to build an array by its class")


_NAMES: Mapping[tuple[str, str], _Stand] = MappingProxyType(
    {
        ("numpy", "ndarray"): _Stand(_no_call),
        ("numpy", "dtype"): _Stand(_dtype),
        ("_codecs", "encode"): _Stand(_bytes_of),
        # numpy 2 moved its inner modules: files exist with either spelling.
        ("numpy.core.multiarray", "_reconstruct"): _Stand(lambda *_: _Array()),
        ("numpy._core.multiarray", "_reconstruct"): _Stand(lambda *_: _Array()),
        ("numpy.core.numeric", "_frombuffer"): _Stand(_frombuffer),
        ("numpy._core.numeric", "_frombuffer"): _Stand(_frombuffer),
    }
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        stand = _NAMES.get((module, name))
        if stand is None:
            raise pickle.UnpicklingError(f"refused the name {module}.{name}")
        return stand


def _text(key: object) -> str:
    if isinstance(key, bytes):
        return key.decode("latin1")
    if not isinstance(key, str):
        raise pickle.UnpicklingError(f"expected names as keys, found {type(key).__name__}")
    return key


def _plain(value: Any) -> Any:
    if not isinstance(value, _Array):
        return value
    if value.value is None:
        raise pickle.UnpicklingError("an array without contents")
    return value.value
