"""Error feedback at a client: the rounding error of its lossy uploads, kept in the client's own state.

A client learns from its next message whether an upload arrived: the server states the last round in which it
heard from this client and, where the upload travelled in packets, which of them arrived. Until then the client keeps
the residual for both cases, and which coordinates each packet had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, RecordDict

from safari.errors import SafariError
from safari.wire import WireLayout
from safari.wire.layout import Floats

MEMORY = "safari.residual"
NEVER = -1
_LOST, _ARRIVED, _ROUND, _PACKETS = "lost", "arrived", "round", "packets"


def read_residual(
    state: Mapping[str, object], size: int, heard: int, came: bytes = b"", wire: WireLayout | None = None
) -> Floats:
    """The residual of a client from which the server last heard in round `heard`.

    `state`: the client's own. `size`: the number of parameters. `came`: a bit for each packet of that upload, 1 where
    it arrived; empty where all did. `wire`: the layout of the packets. Zeros if nothing was kept, or if what was
    kept has another length.
    """
    record = state.get(MEMORY)
    if not isinstance(record, ArrayRecord) or not {_LOST, _ARRIVED, _ROUND} <= set(record):
        return np.zeros(size, np.float32)
    arrived = heard != NEVER and record[_ROUND].numpy().tolist() == [heard]
    lost, settled = record[_LOST].numpy(), record[_ARRIVED].numpy()
    if any(kept.shape != (size,) or kept.dtype != np.float32 for kept in (lost, settled)):
        return np.zeros(size, np.float32)
    if not arrived:
        return lost
    if not came or wire is None:
        return settled
    ranges = record[_PACKETS].numpy().tolist() if _PACKETS in record else []
    if len(came) != -(-len(ranges) // 8):
        raise SafariError(
            f"safari.came must have a bit for each of the {len(ranges)} packets that this client sent in round "
            f"{heard + 1}, got {len(came)} bytes"
        )
    there = np.zeros(wire.d, np.bool_)
    bits = np.unpackbits(np.frombuffer(came, np.uint8), count=len(ranges))
    for (first, span), bit in zip(ranges, bits.tolist(), strict=True):
        there[first : first + span] = bit
    return np.where(wire.from_wire(there)[:size], settled, lost)


def write_residual(
    state: RecordDict, lost: Floats, arrived: Floats, round: int, packets: Sequence[tuple[int, int]] = ()
) -> None:
    """Keep the residuals for both outcomes of this round's upload: `lost` and `arrived`.

    `packets`: the coordinates of each of its packets, (first, count) in wire order, where it travelled in packets.
    """
    last = np.array([round], np.int64)
    parts: dict[str, npt.NDArray[Any]] = {_LOST: lost, _ARRIVED: arrived, _ROUND: last}
    if packets:
        parts[_PACKETS] = np.array(packets, np.int64)
    state[MEMORY] = ArrayRecord({name: Array(array) for name, array in parts.items()})
