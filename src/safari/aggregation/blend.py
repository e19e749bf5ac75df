"""The mixture of known vectors that is expected to be nearest to an unknown one."""

from __future__ import annotations

import torch
from torch import Tensor

# Ridge penalty: keeps nearly collinear vectors from getting large weights of opposite sign.
_RIDGE = 1e-3
# A vector re-enters the active set only for a gain above rounding.
_WORTH = 1e-9


def blend(
    among: Tensor,
    to: Tensor,
    allowed: Tensor,
    *,
    whole: bool = False,
    which: Tensor | None = None,
    near: Tensor | None = None,
) -> Tensor:
    """For each row j the weights c ≥ 0, Σ c ≤ 1, that minimise cᵀ·among·c - 2·to[j]ᵀ·c (`whole`: Σ c = 1).

    `among[i, k]` is the expected product of two known vectors (or `among[j, i, k]`, where each row has its
    own), `to[j, i]` of an unknown and a known one. `which`: for many rows of which several share a matrix,
    `among[which[j], i, k]`; then rows that are done are left out of further passes. `near[j]`: the weights that the
    ridge penalty favours, instead of 0.

    An active-set method: vectors with negative weights leave the set, and vectors that would improve the
    objective re-enter it, until neither happens. A row with an empty set is 0.

    >>> two_alike = torch.tensor([[1.0, 0.8, -0.3], [0.8, 1.0, -0.3], [-0.3, -0.3, 1.0]]).double()
    >>> unknown = torch.tensor([[0.9, 0.9, -0.3], [-0.3, -0.3, 0.6]]).double()
    >>> everybody = torch.ones(2, 3, dtype=torch.bool)
    >>> [[round(c, 2) for c in row] for row in blend(two_alike, unknown, everybody).tolist()]
    [[0.5, 0.5, 0.0], [0.0, 0.0, 0.6]]
    """
    count = among.shape[-1]
    eye = torch.eye(count, dtype=among.dtype, device=among.device)
    # A matrix of pairwise estimates need not be positive semidefinite: shift its spectrum until it is.
    least = torch.linalg.eigvalsh(among)[..., :1, None].clamp(max=0.0)
    ridge = _RIDGE - least
    known = among + ridge * eye
    known, ridge = (known, ridge) if which is None else (known[which], ridge[which])
    to = to if near is None else to + ridge[..., 0] * near
    found, rows = torch.zeros_like(to), torch.arange(len(to), device=to.device)
    inside = allowed
    # Each pass removes vectors, re-admits one, or is the last; in the second half nothing is re-admitted.
    for tries in range(4 * count + 2):
        part = inside.to(known.dtype)
        matrix = torch.where(inside[:, :, None] & inside[:, None, :], known, eye)
        free, level = torch.linalg.solve(matrix, torch.stack([to * part, part], 2)).unbind(2)
        over = free.sum(1, keepdim=True) - 1
        # The Lagrange multiplier of the constraint on the sum.
        price = over / (level * part).sum(1, keepdim=True).clamp(min=1e-30)
        price = price if whole else price.clamp(min=0.0)
        c = (free - level * price) * part
        found[rows] = c
        worst = c.min(1, keepdim=True).values
        # Not all negative ones at once: without the worst, the others may become useful.
        leave = (c < 0) & (c <= worst / 2)
        gain = to - (known @ c[:, :, None])[:, :, 0] - price
        gain = torch.where(allowed & ~inside & (worst >= 0), gain, -torch.inf)
        best = gain.argmax(1, keepdim=True)
        back = torch.zeros_like(inside).scatter(1, best, gain.gather(1, best) > _WORTH)
        if tries > 2 * count:
            back = torch.zeros_like(inside)
        inside = (inside & ~leave) | back
        again = (leave | back).any(1).nonzero()[:, 0]
        if not len(again):
            break
        # LAPACK rounds by where a matrix lies in memory: in few rows, which gain nothing, all stay in place.
        if which is not None:
            rows, known, to = rows[again], known[again], to[again]
            allowed, inside = allowed[again], inside[again]
    # Clears -0.0, too.
    return torch.where(found > 0, found, 0.0)
