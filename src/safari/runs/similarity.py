"""Snapshots of the similarity matrix over the rounds: `similarity.jsonl`, few enough to stay small.

A line holds the pairs above the diagonal, row by row, as little-endian float32 in base64; NaN is a pair
that was never seen together.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from safari.errors import RunError
from safari.runs.checkpoint import opened

# A line has 106 kB with 200 clients; beyond this number of clients none is written.
MOST_CLIENTS = 256
# All of the first rounds, then this many between a round and its double: 147 up to round 5,000.
PER_OCTAVE = 16
# What a rule's state may call it, and the counts that go with running sums.
MATRICES = ("similarity", "alike", "met")
_FLOATS = ("F16", "F32", "F64")


def due(round: int) -> bool:
    """Is there a snapshot after this round (counted from 1)? Does not depend on how long the run is.

    >>> [t for t in range(1, 50) if due(t)][-11:]
    [30, 31, 32, 34, 36, 38, 40, 42, 44, 46, 48]
    """
    step = 1
    while round >= 2 * step * PER_OCTAVE:
        step *= 2
    return round % step == 0


def matrix_of(state: Mapping[str, NDArray[Any]], clients: int) -> NDArray[np.float32] | None:
    """Similarity of each pair of clients as a rule estimates it, from its state; None where it has none.

    The state's `similarity` or `alike`, clients × clients. Where there is also `met`, how often each pair was
    seen, they are sums, and the similarity is their mean; NaN for a pair that was never seen together.

    >>> matrix_of({"alike": np.float64([[3, 1], [1, 0]]), "met": np.float64([[4, 2], [2, 0]])}, 2).tolist()
    [[0.75, 0.5], [0.5, nan]]
    """
    sums, met = state.get("similarity", state.get("alike")), state.get("met")
    if sums is None or sums.shape != (clients, clients):
        return None
    if met is None or met.shape != sums.shape:
        return np.asarray(sums, dtype=np.float32)
    return np.where(met > 0, sums / np.where(met > 0, met, 1), np.nan).astype(np.float32)


def matrix_in_checkpoint(path: Path, clients: int, root: Path | None = None) -> NDArray[np.float32] | None:
    """`matrix_of` the rule's state in a checkpoint, its diagonal NaN; None for a rule that keeps none.

    Reads nothing else of the file. RunError where it cannot be read, or holds numbers of another kind.

    Args:
        path: the checkpoint.
        clients: how many rows and columns the matrix must have.
        root: the run's folder, below which no link is followed.
    """
    found = {}
    with opened(path, root) as (handle, _):
        names = set(handle.keys())
        for name in (name for name in MATRICES if f"rule.{name}" in names):
            part = handle.get_slice(f"rule.{name}")
            if list(part.get_shape()) != [clients, clients]:
                continue
            if part.get_dtype() not in _FLOATS:
                raise RunError(
                    f"{path.name}: rule.{name} must be of {', '.join(_FLOATS)}, got {part.get_dtype()}"
                )
            found[name] = handle.get_tensor(f"rule.{name}").numpy()
    matrix = matrix_of(found, clients)
    if matrix is None:
        return None
    out = np.array(matrix)
    np.fill_diagonal(out, np.nan)
    return out


def to_line(round: int, matrix: NDArray[np.float32]) -> dict[str, Any]:
    """The line for a symmetric matrix.

    >>> to_line(3, np.float32([[0, 1], [1, 0]]))
    {'round': 3, 'clients': 2, 'pairs': 'AACAPw=='}
    """
    clients = len(matrix)
    pairs = np.asarray(matrix, dtype="<f4")[np.triu_indices(clients, 1)]
    return {"round": round, "clients": clients, "pairs": base64.b64encode(pairs.tobytes()).decode()}


def from_line(line: Mapping[str, Any]) -> NDArray[np.float32]:
    """The matrix of a line, its diagonal NaN; RunError when it is not such a line.

    >>> from_line({"round": 3, "clients": 2, "pairs": "AACAPw=="}).tolist()
    [[nan, 1.0], [1.0, nan]]
    """
    clients, text = line.get("clients"), line.get("pairs")
    if not isinstance(clients, int) or not 2 <= clients <= MOST_CLIENTS or not isinstance(text, str):
        raise RunError(f"a similarity line needs clients (2 to {MOST_CLIENTS}) and pairs, got {clients!r}")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RunError(f"pairs must be base64: {error}") from error
    if len(raw) != 2 * clients * (clients - 1):
        raise RunError(f"{clients} clients have {clients * (clients - 1) // 2} pairs, got {len(raw)} bytes")
    out = np.full((clients, clients), np.nan, dtype=np.float32)
    out[np.triu_indices(clients, 1)] = np.frombuffer(raw, dtype="<f4")
    return np.where(np.isnan(out), out.T, out)
