"""Error feedback: what a lossy frame left out goes into the next one, once it is known to have been left out.

The residual is the sender's state, passed in and out. It starts as zeros. It may be shorter than the vector,
and then is about its first numbers: a model's parameters. Buffers, which come after them, need none: they are
statistics that renew themselves, and a variance from which something is taken may fall below 0.
"""

from __future__ import annotations

import numpy as np

from safari.wire.layout import Bools, Floats


def with_residual(vector: Floats, mask: Bools, residual: Floats) -> Floats:
    """Vector to encode: the kept numbers and what earlier frames left out of them.

    >>> vector, mask = np.array([1.0, 0.0], np.float32), np.array([True, False])
    >>> with_residual(vector, mask, np.array([0.25, 0.5], np.float32)).tolist()
    [1.25, 0.0]
    """
    out = np.where(mask, vector, np.float32(0))
    out[: residual.size] += np.where(mask[: residual.size], residual, np.float32(0))
    return out


def settle(residual: Floats, target: Floats, received: Floats, mask: Bools, arrived: Bools | bool) -> Floats:
    """The residual after a round: new where the receiver is known to hold `received`, the old one elsewhere.

    `target` is what `with_residual` gave, `received` what its bytes decode to, `arrived` the coordinates of
    acknowledged packets (or True or False for a whole frame). Cut coordinates keep their residual.

    >>> f = lambda *numbers: np.array(numbers, np.float32)
    >>> settle(f(0, 0.5), f(1.25, 2), f(1, 2.5), np.array([True, True]), np.array([True, False])).tolist()
    [0.25, 0.5]
    """
    first = slice(residual.size)
    return np.where((mask & arrived)[first], target[first] - received[first], residual)
