"""Rounding makes no number of the dense part negative that was not: a batch norm's variance has a root.

The sum is the decoder's, and its sign is right: a float32 and a multiple of a bfloat16 or a number of 16 bits
add up to 0 or to something far above the smallest float64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from safari.wire.layout import Bools, Floats
from safari.wire.scales import Wide

Halves = npt.NDArray[np.uint16]


def sign_lost(values: Floats, base: Floats, change: Wide) -> Bools:
    """Coordinates, as booleans, where `base + change` is negative although the value it stands for is not.

    >>> f = lambda *numbers: np.array(numbers, np.float32)
    >>> sign_lost(f(0.1, -0.1, 0.8), f(0.7, 0.7, 0.7), np.array([-1.0, -1.0, 0.0])).tolist()
    [True, False, False]
    """
    return (values >= 0) & (base.astype(np.float64) + change < 0)


def next_above(halves: Halves) -> Halves:
    """The bits of the next larger bfloat16 or binary16.

    >>> next_above(np.array([-1.5, 0, 1.5], np.float16).view(np.uint16)).view(np.float16)
    array([-1.499e+00,  5.960e-08,  1.501e+00], dtype=float16)
    """
    bits = halves.view(np.int16)
    return (bits + np.where(bits < 0, np.int16(-1), np.int16(1))).view(np.uint16)
