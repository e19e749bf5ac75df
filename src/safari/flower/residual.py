"""Error feedback at a client: the rounding error of its lossy uploads, kept in the client's own state.

A client learns from its next message whether an upload arrived: the server states the last round in which it
heard from this client. Until then the client keeps the residual for both cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, RecordDict

from safari.wire.layout import Floats

MEMORY = "safari.residual"
NEVER = -1
_LOST, _ARRIVED, _ROUND = "lost", "arrived", "round"


def read_residual(state: Mapping[str, object], size: int, heard: int) -> Floats:
    """The residual of a client from which the server last heard in round `heard`.

    `state`: the client's own. `size`: the number of parameters. Zeros if nothing was kept, or if what was
    kept has another length.
    """
    record = state.get(MEMORY)
    if not isinstance(record, ArrayRecord) or not {_LOST, _ARRIVED, _ROUND} <= set(record):
        return np.zeros(size, np.float32)
    arrived = heard != NEVER and record[_ROUND].numpy().tolist() == [heard]
    found = record[_ARRIVED if arrived else _LOST].numpy()
    fits = found.shape == (size,) and found.dtype == np.float32
    return found if fits else np.zeros(size, np.float32)


def write_residual(state: RecordDict, lost: Floats, arrived: Floats, round: int) -> None:
    """Keep the residuals for both outcomes of this round's upload: `lost` and `arrived`."""
    last = np.array([round], np.int64)
    parts: dict[str, npt.NDArray[Any]] = {_LOST: lost, _ARRIVED: arrived, _ROUND: last}
    state[MEMORY] = ArrayRecord({name: Array(array) for name, array in parts.items()})
