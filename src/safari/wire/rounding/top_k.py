"""Top-k with memory (Stich, Cordonnier and Jaggi 2018; Aji and Heafield 2017).

With `Δ` the change and `m` what earlier messages left out, a client sends

    g = top_k(Δ + m)          the k entries of largest magnitude, 0 elsewhere
    m ← Δ + m − g

The memory is the residual of error feedback (`with_residual`, `settle`): this is only the choice.
"""

from __future__ import annotations

import numpy as np

from safari.wire.layout import Bools
from safari.wire.scales import Wide


def top_k(target: Wide, steering: int, fraction: float) -> Bools:
    """Which numbers to send: the largest of the first `steering`, and all the others.

    `k` is the fraction of them, rounded, and at least 1; of equal ones the first are taken. The others are
    biases, norm parameters and statistics: few, and statistics do not add up in a memory.

    >>> top_k(np.array([1.0, -3, 2, 2, 0.1]), 4, 0.5).tolist()
    [False, True, True, False, True]
    """
    sent = np.ones(target.size, np.bool_)
    if steering:
        sizes = np.abs(target[:steering])
        k = max(1, round(fraction * steering))
        edge = np.partition(sizes, steering - k)[steering - k]
        sent[:steering] = sizes > edge
        ties = np.flatnonzero(sizes == edge)
        sent[ties[: k - int(np.count_nonzero(sent[:steering]))]] = True
    return sent
