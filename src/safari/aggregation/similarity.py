"""How alike are two clients? Known only for pairs that arrived together at least once."""

from __future__ import annotations

import torch
from torch import Tensor


def unknown(clients: int, device: torch.device | None = None) -> Tensor:
    """A similarity matrix in which no pair has been seen: all NaN."""
    return torch.full((clients, clients), torch.nan, dtype=torch.float32, device=device)


def observe(similarity: Tensor, ids: Tensor, models: Tensor) -> Tensor:
    """The matrix after these clients arrived together: -‖x_u - x_v‖ for every pair of them.

    >>> observe(unknown(3), torch.tensor([0, 2]), torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    tensor([[-0.,  nan, -5.],
            [nan,  nan, nan],
            [-5.,  nan, -0.]])
    """
    distance = torch.stack([torch.linalg.vector_norm(models - model, dim=1) for model in models])
    out = similarity.clone()
    out[ids[:, None], ids[None, :]] = -distance.to(out.dtype)
    return out


def cosines(updates: Tensor) -> Tensor:
    """The cosine of every pair of rows; 0 beside a row of zeros.

    >>> cosines(torch.tensor([[3.0, 0.0], [1.0, 1.0], [0.0, 0.0]])).round(decimals=4)
    tensor([[1.0000, 0.7071, 0.0000],
            [0.7071, 1.0000, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    """
    unit = torch.nn.functional.normalize(updates, dim=1)
    return (unit @ unit.T).clamp(-1, 1)


def tally(sums: Tensor, counts: Tensor, ids: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Running sums and counts of what was seen of pairs.

    >>> sums, counts = tally(torch.zeros(2, 2), torch.zeros(2, 2), torch.tensor([1]), torch.tensor([[5.0]]))
    >>> sums.tolist(), counts.tolist()
    ([[0.0, 0.0], [0.0, 5.0]], [[0.0, 0.0], [0.0, 1.0]])
    """
    pairs = (ids[:, None], ids[None, :])
    sums, counts = sums.clone(), counts.clone()
    sums[pairs] += seen.to(sums.dtype)
    counts[pairs] += 1
    return sums, counts
