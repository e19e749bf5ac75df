"""The mixture of known vectors that is expected to be nearest to an unknown one."""

from __future__ import annotations

import torch
from torch import Tensor

# Keeps nearly equal vectors from fighting each other with large weights of opposite sign.
_RIDGE = 1e-3


def blend(among: Tensor, to: Tensor, allowed: Tensor, *, whole: bool = False) -> Tensor:
    """For each row j the weights c ≥ 0, Σ c ≤ 1, that minimise cᵀ·among·c - 2·to[j]ᵀ·c (`whole`: Σ c = 1).

    `among[i, k]` is the expected product of two known vectors (or `among[j, i, k]`, where each row has its
    own), `to[j, i]` of an unknown and a known one.
    The vectors with the most negative weights are left out for good, and the others are solved for again: in
    rare cases that is not the very best mixture, but always a sensible one. A row that may use nothing is 0.

    >>> two_alike = torch.tensor([[1.0, 0.8, -0.3], [0.8, 1.0, -0.3], [-0.3, -0.3, 1.0]]).double()
    >>> unknown = torch.tensor([[0.9, 0.9, -0.3], [-0.3, -0.3, 0.6]]).double()
    >>> everybody = torch.ones(2, 3, dtype=torch.bool)
    >>> [[round(c, 2) for c in row] for row in blend(two_alike, unknown, everybody).tolist()]
    [[0.5, 0.5, 0.0], [0.0, 0.0, 0.6]]
    """
    count = among.shape[-1]
    eye = torch.eye(count, dtype=among.dtype, device=among.device)
    # Products that were estimated pair by pair need not fit together: as much noise as makes them.
    least = torch.linalg.eigvalsh(among)[..., :1, None].clamp(max=0.0)
    known = among + (_RIDGE - least) * eye
    c = torch.zeros_like(to)
    # Each pass leaves somebody out, or is the last.
    for _ in range(count + 1):
        inside = allowed.to(known.dtype)
        matrix = torch.where(allowed[:, :, None] & allowed[:, None, :], known, eye)
        sides = torch.stack([to * inside, inside], 2)
        free, level = torch.linalg.solve(matrix, sides).unbind(2)
        total, over = level.sum(1, keepdim=True), 1 - free.sum(1, keepdim=True)
        bound = free + level * over / total.clamp(min=1e-30)
        c = (bound if whole else torch.where(over < 0, bound, free)) * inside
        worst = c.min(1, keepdim=True).values
        if not bool((worst < 0).any()):
            break
        # Not all negative ones: without the worst, the others may well help.
        allowed = allowed & ~((c < 0) & (c <= worst / 2))
    # Also no -0.0.
    return torch.where(c > 0, c, 0.0)
