"""Similarity between clients, observed for pairs that arrived together at least once."""

from __future__ import annotations

import torch
from torch import Tensor

# Numbers converted to float64 at once: 32 MB.
_AT_ONCE = 4_000_000
# Relative rounding error of sums of products in float64, with room for the longest models.
_ROUNDING = 1e-13


def unknown(clients: int, device: torch.device | None = None) -> Tensor:
    """A similarity matrix in which no pair has been seen: all NaN."""
    return torch.full((clients, clients), torch.nan, dtype=torch.float32, device=device)


def distances(models: Tensor, centre: Tensor | None = None) -> Tensor:
    """‖x_u - x_v‖ for every pair of rows, in float64.

    Computed from inner products of the differences to `centre`, the model that all started from: subtracting
    each pair of a thousand clients would read every model a thousand times. What is within rounding of 0 is 0.

    >>> distances(torch.tensor([[1.0, 1.0], [4.0, 5.0], [1.0, 1.0]])).tolist()
    [[0.0, 5.0, 0.0], [5.0, 0.0, 5.0], [0.0, 5.0, 0.0]]
    """
    products = torch.zeros(len(models), len(models), dtype=torch.float64, device=models.device)
    # In slices, so that float64 copies stay small.
    width = max(1, _AT_ONCE // max(1, len(models)))
    for start in range(0, models.shape[1], width):
        part = models[:, start : start + width].double()
        part = part if centre is None else part - centre[start : start + width]
        products += part @ part.T
    lengths = products.diagonal()
    sums = lengths[:, None] + lengths[None, :]
    squares = sums - (products + products.T)
    return torch.where(squares > _ROUNDING * sums, squares, 0.0).sqrt()


def common_distances(models: Tensor, centre: Tensor, came: Tensor) -> Tensor:
    """Estimates of ‖x_u - x_v‖ for every pair of rows from the numbers that came of both; NaN where none did.

    Numbers differ in how much they move, and pairs in which of them came. So the squared distance over what
    is common is scaled by how much of all movement lies there, with s_k the mean square of x_i - x over
    those i of whom number k came:

        ‖x_u - x_v‖² ≈ Σ_{k common} (x_u - x_v)_k² · Σ_k s_k / Σ_{k common} s_k

    >>> models, x = torch.tensor([[1.0, 1.0, 9.0], [4.0, 5.0, 9.0]]), torch.zeros(3)
    >>> came = torch.tensor([[True, True, True], [True, True, False]])
    >>> common_distances(models, x, came).round(decimals=3)[0].tolist()     # 5 · √((8.5 + 13 + 81) / 21.5)
    [0.0, 10.917]
    """
    count = len(models)
    shape = (count, count)
    products, lengths, parts = (models.new_zeros(shape, dtype=torch.float64) for _ in range(3))
    total = models.new_zeros((), dtype=torch.float64)
    width = max(1, _AT_ONCE // max(1, count))
    for start in range(0, models.shape[1], width):
        here = slice(start, start + width)
        there = came[:, here].double()
        moved = (models[:, here].double() - centre[here]) * there
        squares = moved * moved
        usual = squares.sum(0) / there.sum(0).clamp(min=1)
        products += moved @ moved.T
        lengths += squares @ there.T
        parts += (there * usual) @ there.T
        total += usual.sum()
    sums = lengths + lengths.T
    squares = sums - (products + products.T)
    squares = torch.where(squares > _ROUNDING * sums, squares, 0.0) * (total / parts.clamp(min=1e-300))
    # Where none of the numbers that both sent has moved, they are alike as far as one can see.
    met = came.to(models.dtype) @ came.to(models.dtype).T > 0
    return torch.where(met, torch.where(parts > 0, squares, 0.0), torch.nan).sqrt()


def common_cosines(updates: Tensor, came: Tensor, others: Tensor, others_came: Tensor) -> Tensor:
    """The cosine of each row of `updates` with each of `others`, over the numbers that came of both.

    Both are 0 where nothing came. NaN where nothing is common; 0 beside a row that is 0 there.

    >>> updates, came = torch.tensor([[3.0, 4.0, 0.0]]), torch.tensor([[True, True, False]])
    >>> common_cosines(updates, came, torch.tensor([[6.0, 8.0, 100.0]]), torch.ones(1, 3, dtype=torch.bool))
    tensor([[1.]])
    """
    here, there = came.to(updates.dtype), others_came.to(updates.dtype)
    products = updates @ others.T
    lengths = (updates * updates) @ there.T * (here @ (others * others).T)
    cosines = products / lengths.sqrt().clamp(min=1e-30)
    return torch.where(here @ there.T > 0, cosines.clamp(-1, 1), torch.nan)


def observe(
    similarity: Tensor,
    ids: Tensor,
    models: Tensor,
    centre: Tensor | None = None,
    came: Tensor | None = None,
) -> Tensor:
    """The matrix after these clients arrived together: -‖x_u - x_v‖ for every pair of them.

    `centre`: the model that all began with. `came`: True where a number arrived, where not all did; a pair
    that has nothing in common stays as it was.

    >>> observe(unknown(3), torch.tensor([0, 2]), torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    tensor([[-0.,  nan, -5.],
            [nan,  nan, nan],
            [-5.,  nan, -0.]])
    """
    out = similarity.clone()
    pairs = (ids[:, None], ids[None, :])
    if came is None:
        out[pairs] = -distances(models, centre).to(out.dtype)
        return out
    x = torch.zeros_like(models[0]) if centre is None else centre
    found = -common_distances(models, x, came).to(out.dtype)
    out[pairs] = torch.where(found.isnan(), out[pairs], found)
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
    """Running sums and counts of what was seen of pairs; NaN: nothing was.

    >>> sums, counts = tally(torch.zeros(2, 2), torch.zeros(2, 2), torch.tensor([1]), torch.tensor([[5.0]]))
    >>> sums.tolist(), counts.tolist()
    ([[0.0, 0.0], [0.0, 5.0]], [[0.0, 0.0], [0.0, 1.0]])
    """
    pairs = (ids[:, None], ids[None, :])
    sums, counts = sums.clone(), counts.clone()
    sums[pairs] += seen.nan_to_num(nan=0.0).to(sums.dtype)
    counts[pairs] += ~seen.isnan()
    return sums, counts
