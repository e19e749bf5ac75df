"""A strict reader of `.npy` bytes that came over a network.

`numpy.load` also opens zip archives and pickles, and evaluates headers of any shape: too much for bytes of
unknown origin. This one reads what `numpy.save` writes for a plain array of real numbers, whose shape the
reader knows beforehand, and nothing else.
"""

from __future__ import annotations

import math
import re
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from safari.errors import SafariError

_MAGIC = b"\x93NUMPY"
# The header's length field, by version. Version 3 differs only in field names beyond Latin-1, which no plain
# array has.
_LENGTHS = {b"\x01\x00": "<H", b"\x02\x00": "<I"}
# numpy writes at most 64 dimensions of up to 19 digits.
_LONGEST_HEADER = 2048
_HEADER = re.compile(
    r"\{'descr': ?'(?P<type>[<>|=]?[a-z][0-9]{1,2})', ?"
    r"'fortran_order': ?(?P<fortran>True|False), ?"
    r"'shape': ?\((?P<shape>[0-9, ]*)\),? ?\}[ \n]*",
    re.ASCII,
)
_TYPES = frozenset({"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"})


def read_npy(data: bytes, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """The array in `data`, which must have exactly this shape; SafariError says what is wrong.

    The array is a read-only view of `data`, so that nothing is allocated for a header that claims too much.

    >>> import io
    >>> buffer = io.BytesIO()
    >>> np.save(buffer, np.float32([[1, 2, 3]]))
    >>> read_npy(buffer.getvalue(), (1, 3)).tolist()
    [[1.0, 2.0, 3.0]]
    """
    start, header = _header(data)
    found = _HEADER.fullmatch(header)
    if found is None:
        raise SafariError(f"the header must be as numpy.save writes it, got {header[:60]!r}")
    kind = found["type"].lstrip("<>|=")
    if kind not in _TYPES:
        raise SafariError(f"the numbers must be one of {', '.join(sorted(_TYPES))}, got {found['type']!r}")
    # Compared as text: whatever else the header claims is never made into a number.
    wanted = str(shape).replace(" ", "")
    if f"({found['shape'].replace(' ', '')})" != wanted:
        raise SafariError(f"the shape must be {shape}, got ({found['shape'][:60]})")
    dtype = np.dtype(found["type"])
    size = math.prod(shape) * dtype.itemsize
    if len(data) - start != size:
        raise SafariError(f"{size} bytes must follow the header, got {len(data) - start}")
    array = np.frombuffer(data, dtype, offset=start)
    return array.reshape(shape, order="F" if found["fortran"] == "True" else "C")


def _header(data: bytes) -> tuple[int, str]:
    """Offset of the numbers, and the text of the header before them."""
    if not data.startswith(_MAGIC):
        raise SafariError(f"the bytes must begin with {_MAGIC.hex()}, got {data[:6].hex() or 'nothing'}")
    form = _LENGTHS.get(data[6:8])
    if form is None:
        raise SafariError(f"the format version must be 1.0 or 2.0, got {'.'.join(map(str, data[6:8]))}")
    begin = 8 + struct.calcsize(form)
    if len(data) < begin:
        raise SafariError("the header is cut short")
    (length,) = struct.unpack(form, data[8:begin])
    if length > _LONGEST_HEADER:
        raise SafariError(f"the header must have at most {_LONGEST_HEADER} bytes, got {length}")
    if len(data) < begin + length:
        raise SafariError("the header is cut short")
    return begin + length, data[begin : begin + length].decode("latin-1")
