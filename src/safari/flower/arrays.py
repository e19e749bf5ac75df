"""A model inside Flower's records: one frame of the wire format, or one array a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from safari.errors import SafariError
from safari.flower.npy import read_npy
from safari.flower.text import visible
from safari.models import Layout

FRAME_TYPE = "safari.frame.1"
CHAIN_TYPE = "safari.chain.1"
# How Flower says that an array is in numpy's own format.
_NPY_TYPE = "numpy.ndarray"
_FRAME = "frame"


def frame_record(frame: bytes) -> ArrayRecord:
    """A frame as one array: Flower stores and moves it as it is.

    >>> frame_of(frame_record(b"abc"))
    b'abc'
    """
    return ArrayRecord({_FRAME: Array("uint8", (len(frame),), FRAME_TYPE, frame)})


def frame_of(record: Mapping[str, Array]) -> bytes | None:
    """The frame in a record; None where it holds plain arrays."""
    arrays = list(record.values())
    return arrays[0].data if len(arrays) == 1 and arrays[0].stype == FRAME_TYPE else None


def chain_record(frames: Sequence[bytes]) -> ArrayRecord:
    """Frames that build on each other, the oldest first.

    >>> chain_of(chain_record([b"a", b"bc"]))
    [b'a', b'bc']
    """
    return ArrayRecord(
        {f"{i:03}": Array("uint8", (len(frame),), CHAIN_TYPE, frame) for i, frame in enumerate(frames)}
    )


def chain_of(record: Mapping[str, Array]) -> list[bytes] | None:
    """The frames of a chain; None where it is none."""
    if not record or any(array.stype != CHAIN_TYPE for array in record.values()):
        return None
    return [record[name].data for name in sorted(record)]


def dense_record(layout: Layout, vector: Tensor, others: Mapping[str, Array] | None = None) -> ArrayRecord:
    """A vector as a state_dict's arrays; `others` are those that no vector holds, such as counters."""
    parts = {name: Array(part.cpu().numpy()) for name, part in layout.split(vector).items()}
    return ArrayRecord({**parts, **(others or {})})


def others_of(record: Mapping[str, Array], layout: Layout) -> dict[str, Array]:
    """The arrays of a state_dict that the vector does not hold."""
    held = {entry.name for entry in layout.entries}
    return {name: array for name, array in record.items() if name not in held}


def dense_vector(record: Mapping[str, Array], layout: Layout) -> Tensor:
    """The vector in a record of plain arrays; SafariError names the array that is missing or does not fit.

    Numbers too large for float32 become infinite, which the server refuses.
    """
    parts: dict[str, Tensor] = {}
    for entry in layout.entries:
        if entry.name not in record:
            raise SafariError(f"there is no array {entry.name!r}")
        array = record[entry.name]
        if array.stype != _NPY_TYPE:
            raise SafariError(
                f"{entry.name} must be serialised as {_NPY_TYPE}, got {visible(array.stype, 60)!r}"
            )
        try:
            numbers = read_npy(array.data, entry.shape)
        except SafariError as error:
            raise SafariError(f"{entry.name} cannot be read: {error}") from error
        with np.errstate(over="ignore"):
            parts[entry.name] = torch.from_numpy(numbers.astype(np.float32))
    return layout.join(parts)
