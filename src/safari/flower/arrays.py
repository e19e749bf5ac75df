"""A model inside Flower's records: one frame of the wire format, or one array a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn

from safari.errors import SafariError
from safari.flower.npy import read_npy
from safari.models import Layout
from safari.text import visible

FRAME_TYPE = "safari.frame.1"
CHAIN_TYPE = "safari.chain.1"
PACKETS_TYPE = "safari.packets.1"
# Extra payloads in the record of a model, lost with it: votes, masks, vectors of an algorithm.
BESIDE_TYPE = "safari.beside.1"
VOTES, MASK, VECTOR = "votes", "mask", "vector."
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
    arrays = [array for array in record.values() if array.stype != BESIDE_TYPE]
    return arrays[0].data if len(arrays) == 1 and arrays[0].stype == FRAME_TYPE else None


def packets_record(packets: Sequence[bytes]) -> ArrayRecord:
    """Packets of one model, to be sent in datagrams.

    >>> packets_of(packets_record([b"a", b"bc"]))
    [b'a', b'bc']
    """
    return ArrayRecord(
        {f"{i:05}": Array("uint8", (len(data),), PACKETS_TYPE, data) for i, data in enumerate(packets)}
    )


def packets_of(record: Mapping[str, Array]) -> list[bytes] | None:
    """The packets in a record; None where it holds something else."""
    if not len(record) or any(array.stype != PACKETS_TYPE for array in record.values()):
        return None
    return [record[name].data for name in sorted(record)]


def chain_record(frames: Sequence[bytes]) -> ArrayRecord:
    """Frames that build on each other, the oldest first.

    >>> chain_of(chain_record([b"a", b"bc"]))
    [b'a', b'bc']
    """
    return ArrayRecord(
        {f"{i:03}": Array("uint8", (len(frame),), CHAIN_TYPE, frame) for i, frame in enumerate(frames)}
    )


def chain_of(record: Mapping[str, Array]) -> list[bytes] | None:
    """The frames of a chain, none of them where there is nothing new; None where it is no chain."""
    names = [name for name in sorted(record) if record[name].stype != BESIDE_TYPE]
    if any(record[name].stype != CHAIN_TYPE for name in names):
        return None
    return [record[name].data for name in names]


def with_beside(record: ArrayRecord, beside: Mapping[str, bytes]) -> ArrayRecord:
    """A model's record with the extra payloads that accompany it, by name.

    >>> record = with_beside(frame_record(b"abc"), {"votes": b"de"})
    >>> frame_of(record), beside_of(record)
    (b'abc', {'votes': b'de'})
    """
    more = {name: Array("uint8", (len(data),), BESIDE_TYPE, data) for name, data in beside.items()}
    return ArrayRecord({**record, **more}) if more else record


def beside_of(record: Mapping[str, Array]) -> dict[str, bytes]:
    """Extra payloads that accompany a model in its record, by name."""
    return {name: array.data for name, array in record.items() if array.stype == BESIDE_TYPE}


def pack_broadcast(record: Mapping[str, Array]) -> bytes:
    """A model's record as one message, to be sent in datagrams: the extra payloads, and the model's frame.

        1 byte count | for each part: 1 byte length of the name, name, 4 bytes size | the parts | the frame

    Together, because neither the model nor its algorithm's vectors are of use without the other.

    >>> record = with_beside(frame_record(b"abc"), {"votes": b"de"})
    >>> pack_broadcast(record)
    b'\\x01\\x05votes\\x02\\x00\\x00\\x00deabc'
    """
    frame, beside = frame_of(record), beside_of(record)
    if frame is None:
        raise SafariError("datagrams need the model as one frame: download='frame'")
    names = {name: name.encode() for name in beside}
    if len(beside) > 255 or any(len(name) > 255 for name in names.values()):
        raise SafariError(f"at most 255 parts with names of 255 bytes fit beside a model, got {len(beside)}")
    head = b"".join(
        bytes([len(names[name])]) + names[name] + len(data).to_bytes(4, "little")
        for name, data in beside.items()
    )
    return b"".join([bytes([len(beside)]), head, *beside.values(), frame])


def unpack_broadcast(data: bytes) -> ArrayRecord:
    """The record that `pack_broadcast` wrote; SafariError where it cannot be."""
    if not data:
        raise SafariError("the broadcast must hold a model, it is empty")
    at, sizes = 1, dict[str, int]()
    for _ in range(data[0]):
        end = at + 1 + (data[at] if at < len(data) else 0)
        name, size = data[at + 1 : end].decode(errors="replace"), data[end : end + 4]
        if len(size) < 4 or name in sizes:
            raise SafariError(
                f"the broadcast must name each part once and give its size, at byte {at} it does not"
            )
        sizes[name], at = int.from_bytes(size, "little"), end + 4
    if at + sum(sizes.values()) > len(data):
        raise SafariError(f"the broadcast must hold the parts that it names, and has {len(data)} bytes")
    beside = {}
    for name, length in sizes.items():
        beside[name], at = data[at : at + length], at + length
    return with_beside(frame_record(data[at:]), beside)


def state_names(module: nn.Module, layout: Layout) -> dict[str, str | None]:
    """Every name of a module's state_dict, in its order, with the layout's name of the same tensor.

    None where the layout does not hold it, such as a counter. Two names of one tensor, tied weights, have one
    name in the layout.

    >>> norm = nn.BatchNorm1d(2, affine=False)
    >>> state_names(norm, Layout.of(norm))
    {'running_mean': 'running_mean', 'running_var': 'running_var', 'num_batches_tracked': None}
    """
    state = module.state_dict(keep_vars=True)
    held = {id(state[entry.name]): entry.name for entry in layout.entries}
    return {name: held.get(id(tensor)) for name, tensor in state.items()}


def dense_record(
    layout: Layout,
    vector: Tensor,
    others: Mapping[str, Array] | None = None,
    names: Mapping[str, str | None] | None = None,
) -> ArrayRecord:
    """A vector as the arrays of a state_dict.

    `others`: the arrays that no vector holds, such as counters. `names`: as `state_names` gives them, for the
    order and for tied weights; without, the layout's own order.
    """
    parts = {name: Array(part.cpu().numpy()) for name, part in layout.split(vector).items()}
    rest = dict(others or {})
    if names is None:
        return ArrayRecord({**parts, **rest})
    found = {name: parts[held] if held else rest.get(name) for name, held in names.items()}
    return ArrayRecord({name: array for name, array in found.items() if array is not None})


def others_of(record: Mapping[str, Array], names: Mapping[str, str | None]) -> dict[str, Array]:
    """The arrays of a state_dict that the vector does not hold, `names` being as `state_names` gives them."""
    return {name: array for name, array in record.items() if name in names and names[name] is None}


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
