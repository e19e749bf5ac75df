"""Thresholding (Strom 2015).

With `r` the change and what earlier messages left out, and a threshold `τ`, a client sends

    g_i = +τ if r_i > τ,   −τ if r_i < −τ,   nothing otherwise
    r ← r − g

so that a message is a list of places with a sign each. `r` is the residual of error feedback. What waits
stays below `τ` as long as no number moves by more than `τ` in a round: take about the largest change that is
usual. (A threshold that grows with `r` would not do: where nothing is far beyond the others, nothing would
ever be sent.)
"""

from __future__ import annotations

import numpy as np

from safari.wire.kept import Quantised
from safari.wire.scales import Wide, least_quantum, multiples, near_bf16


def threshold(target: Wide, steering: int, tau: float) -> Quantised:
    """Multiples of `τ`: of the first `steering` numbers those beyond it, once; of the others the nearest.

    The others are biases, norm parameters and statistics, which have no memory in which the rest could wait.

    >>> threshold(np.array([3.0, 0.5, -3, 0.5]), 4, 2.0).whole.tolist()
    [1, 0, -1, 0]
    """
    scale = np.maximum(near_bf16(tau), least_quantum(target)) if target.size else near_bf16(tau)
    whole = multiples(target, scale)
    leading = target[:steering]
    whole[:steering] = np.where(np.abs(leading) > float(scale[0]), np.sign(leading), 0)
    return Quantised(scale, whole)
