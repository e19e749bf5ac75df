"""How alike are two clients? Known only for pairs that arrived together at least once."""

from __future__ import annotations

import torch
from torch import Tensor

# Numbers that are looked at together in float64: 32 MB.
_AT_ONCE = 4_000_000
# Of sums of products in float64, with room for the longest models.
_ROUNDING = 1e-13


def unknown(clients: int, device: torch.device | None = None) -> Tensor:
    """A similarity matrix in which no pair has been seen: all NaN."""
    return torch.full((clients, clients), torch.nan, dtype=torch.float32, device=device)


def distances(models: Tensor, centre: Tensor | None = None) -> Tensor:
    """‖x_u - x_v‖ for every pair of rows, in float64.

    From products of what they differ by from `centre`, the model that they began with: to subtract each pair
    of a thousand clients would read all their models a thousand times. What is within rounding of 0 is 0.

    >>> distances(torch.tensor([[1.0, 1.0], [4.0, 5.0], [1.0, 1.0]])).tolist()
    [[0.0, 5.0, 0.0], [5.0, 0.0, 5.0], [0.0, 5.0, 0.0]]
    """
    products = torch.zeros(len(models), len(models), dtype=torch.float64, device=models.device)
    # A model may be long: not all of them twice as wide at once.
    width = max(1, _AT_ONCE // max(1, len(models)))
    for start in range(0, models.shape[1], width):
        part = models[:, start : start + width].double()
        part = part if centre is None else part - centre[start : start + width]
        products += part @ part.T
    lengths = products.diagonal()
    sums = lengths[:, None] + lengths[None, :]
    squares = sums - (products + products.T)
    return torch.where(squares > _ROUNDING * sums, squares, 0.0).sqrt()


def observe(similarity: Tensor, ids: Tensor, models: Tensor, centre: Tensor | None = None) -> Tensor:
    """The matrix after these clients arrived together: -‖x_u - x_v‖ for every pair of them.

    `centre`: the model that all began with.

    >>> observe(unknown(3), torch.tensor([0, 2]), torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    tensor([[-0.,  nan, -5.],
            [nan,  nan, nan],
            [-5.,  nan, -0.]])
    """
    out = similarity.clone()
    out[ids[:, None], ids[None, :]] = -distances(models, centre).to(out.dtype)
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
