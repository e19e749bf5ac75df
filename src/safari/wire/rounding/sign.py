"""signSGD (Bernstein et al. 2018), scaled as in EF-signSGD (Karimireddy et al. 2019).

With `Δ` the `n` numbers of an entry, each of them travels as

    (‖Δ‖₁ / n) · sign(Δ_i),      sign(0) = +1

in one bit, and the scale beside them in a bfloat16. The method needs error feedback. A majority vote over
clients is the server's affair, and the rule `majority-vote` (`safari.aggregation.majority_vote`).
"""

from __future__ import annotations

import numpy as np

from safari.wire.kept import Kept, Quantised
from safari.wire.scales import LARGEST, Wide, from_bf16, to_bf16


def sign(kept: Kept, target: Wide) -> Quantised:
    """One scale for each entry, and plus or minus one of it for each number.

    >>> kept = Kept(np.array([3, -1, 2], np.float32), None, np.array([3]), 3)
    >>> found = sign(kept, kept.target)
    >>> found.scales.tolist(), found.whole.tolist()
    ([2.0], [1, -1, 1])
    """
    before = np.concatenate([[0], np.cumsum(np.abs(target))])
    sums = np.diff(before[np.concatenate([[0], np.cumsum(kept.counts)])])
    means = np.minimum(sums / np.maximum(kept.counts, 1), LARGEST)
    scales = from_bf16(to_bf16(means.astype(np.float32)))
    whole = np.where(target < 0, -1, 1).astype(np.int32)
    numbers = Quantised(scales, whole)
    if kept.base is None:
        return numbers
    # A dense number that would fall below 0 goes up instead.
    lost = numbers.signed(kept).whole != whole
    return Quantised(scales, np.where(lost, 1, whole).astype(np.int32))
