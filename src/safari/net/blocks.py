"""Reassembly of a partially received model; each packet states the coordinates that it carries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from safari.errors import WireError
from safari.net.server import Upload
from safari.wire.identity import Identity
from safari.wire.layout import Bools, Floats
from safari.wire.packet import Part, decode_packet, merge
from safari.wire.shared import Shared


@dataclass(frozen=True, eq=False)
class Delivery:
    """The received part of a model: 0 and False where `arrived` is False.

    Args:
        vector: The model.
        mask: True where a weight is kept.
        arrived: True where a coordinate was received.
        ranges: The received coordinates as (first, count) in wire order, ascending and disjoint.
        numbers: The numbers of the usable packets, ascending.
        total: Number of packets sent, as stated by the client; 0 if none was received.
        refused: Number of authentic packets that could not be decoded.
        size: Total size of the usable packets in bytes.
        modes: Value and mask modes of the packets, for the record; empty if nothing was received.
    """

    vector: Floats
    mask: Bools
    arrived: Bools
    ranges: tuple[tuple[int, int], ...]
    numbers: tuple[int, ...]
    total: int
    refused: int
    size: int
    modes: str

    @property
    def packets(self) -> int:
        """Number of usable packets."""
        return len(self.numbers)

    @property
    def bits(self) -> bytes:
        """A bit for each packet that the client sent, the first one highest in its byte: 1 where it is usable."""
        sent = np.zeros(self.total, np.bool_)
        sent[list(self.numbers)] = True
        return np.packbits(sent).tobytes()

    @property
    def whole(self) -> bool:
        """All coordinates were received."""
        return bool(self.arrived.all())


def assemble(upload: Upload, shared: Shared, identity: Identity) -> Delivery:
    """Merge the packets of an upload; packets of another client, round or model are refused."""
    parts: list[Part] = []
    numbers: list[int] = []
    refused, size = 0, 0
    for number in sorted(upload.packets):
        data = upload.packets[number]
        try:
            parts.append(decode_packet(data, shared, expect=identity))
        except WireError:
            refused += 1
        else:
            numbers.append(number)
            size += len(data)
    merged = merge(parts, shared)
    modes = sorted({f"{part.modes.values}, mask {part.modes.mask}" for part in parts})
    ranges = join_ranges([(part.first, part.mask.size) for part in parts])
    return Delivery(
        merged.vector,
        merged.mask,
        merged.arrived,
        ranges,
        tuple(numbers),
        upload.total,
        refused,
        size,
        " + ".join(modes),
    )


def join_ranges(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges (first, count) with neighbours and overlaps joined, ascending.

    >>> join_ranges([(10, 5), (0, 4), (4, 2), (12, 6)])
    ((0, 6), (10, 8))
    """
    out: list[tuple[int, int]] = []
    for first, count in sorted(ranges):
        if out and first <= sum(out[-1]):
            start = out[-1][0]
            out[-1] = start, max(sum(out[-1]), first + count) - start
        else:
            out.append((first, count))
    return tuple(out)
