"""Error feedback: what a lossy frame left out goes into the next one, once it is known to have been left out.

The residual is the sender's state, passed in and out. It starts as zeros.
"""

from __future__ import annotations

import numpy as np

from safari.wire.layout import Bools, Floats


def with_residual(vector: Floats, mask: Bools, residual: Floats) -> Floats:
    """What to encode: the kept numbers and what earlier frames left out of them.

    >>> vector, mask = np.array([1.0, 0.0], np.float32), np.array([True, False])
    >>> with_residual(vector, mask, np.array([0.25, 0.5], np.float32)).tolist()
    [1.25, 0.0]
    """
    return np.where(mask, vector + residual, np.float32(0))


def settle(residual: Floats, target: Floats, received: Floats, mask: Bools, arrived: Bools | bool) -> Floats:
    """The residual after a round: new where the receiver is known to hold `received`, the old one elsewhere.

    `target` is what `with_residual` gave, `received` what its bytes decode to, `arrived` the coordinates of
    acknowledged packets (or True or False for a whole frame). Cut coordinates keep their residual.

    >>> f = lambda *numbers: np.array(numbers, np.float32)
    >>> settle(f(0, 0.5), f(1.25, 2), f(1, 2.5), np.array([True, True]), np.array([True, False])).tolist()
    [0.25, 0.5]
    """
    return np.where(mask & arrived, target - received, residual)
