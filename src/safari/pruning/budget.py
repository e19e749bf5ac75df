"""Budgets of masks and the choice of the best weights by score: exact counts, ties broken by index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real

import torch
from torch import Tensor

from safari.errors import PruneError


@dataclass(frozen=True)
class Budget:
    """Numbers of prunable weights that a mask keeps.

    `total` is the number over all layers. `layers` fixes the number of each prunable layer, in the order of
    the layout; None means one ranking over all of them. `least` is, for one ranking, the fewest weights that
    each layer keeps, whatever the ranking.
    """

    total: int
    layers: tuple[int, ...] | None = None
    least: tuple[int, ...] | None = None

    def meets(self, counts: Sequence[int]) -> bool:
        """Do layers that hold these numbers of weights fit the budget without a further cut?

        >>> Budget(3).meets([1, 2]), Budget(3, layers=(2, 1)).meets([1, 2])
        (True, False)
        """
        if self.layers is not None:
            return all(count <= most for count, most in zip(counts, self.layers, strict=True))
        return sum(counts) <= self.total

    def toward(self, counts: Sequence[int], part: float) -> Budget:
        """The budget after a part (0 to 1) of an exponential schedule that starts with layers of these sizes.

        >>> Budget(25).toward([60, 40], 0.5).total
        50
        """
        if self.layers is not None:
            goals = tuple(
                _exponential(count, most, part) for count, most in zip(counts, self.layers, strict=True)
            )
            return Budget(sum(goals), goals)
        return Budget(_exponential(sum(counts), self.total, part), least=self.least)


def _exponential(start: int, end: int, part: float) -> int:
    if end >= start or end == 0:
        # An exponential never reaches 0: an empty layer is cut at once.
        return min(start, end)
    return max(end, round(start * math.exp(part * math.log(end / start))))


def kept_count(total: int, sparsity: float, field: str = "sparsity") -> int:
    """Number of weights to keep of `total`: exactly round((1 - sparsity) · total), in decimal arithmetic.

    >>> kept_count(15, 0.9)  # floats would say round(1.4999999999999998) = 1
    2
    """
    if not _is_number(sparsity):
        raise PruneError(f"{field} must be a number, at least 0 and below 1, got {sparsity!r}")
    if not 0 <= sparsity < 1:  # NaN fails this too
        raise PruneError(f"{field} must be at least 0 and below 1, got {sparsity}")
    if total == 0:
        raise PruneError(
            "there is nothing to prune: the module has no weights in convolution or linear layers"
        )
    kept = round((1 - Fraction(repr(float(sparsity)))) * total)
    if kept == 0:
        raise PruneError(
            f"{field} must be at most {_largest_sparsity(total)} to keep any of {total} weights, "
            f"got {sparsity}"
        )
    return kept


def _is_number(value: object) -> bool:
    return isinstance(value, Real | Tensor) and not isinstance(value, bool)


def _largest_sparsity(total: int) -> str:
    """The largest decimal of few digits that keeps a weight: half a weight is rounded to none."""
    digits = len(str(total)) + 2
    below = math.ceil((1 - Fraction(1, 2 * total)) * 10**digits) - 1
    return f"0.{below:0{digits}d}"


def top_k(scores: Tensor, keep: int, among: Tensor | None = None) -> Tensor:
    """True for the `keep` highest scores, the lower index first among equals; only where `among` is True.

    >>> top_k(torch.tensor([3.0, 1.0, 3.0, 2.0]), 2)
    tensor([ True, False,  True, False])
    >>> top_k(torch.tensor([3.0, 1.0, 3.0, 2.0]), 2, among=torch.tensor([True, True, False, False]))
    tensor([ True,  True, False, False])
    """
    if among is not None:
        candidates = among.nonzero().squeeze(1)
        mask = torch.zeros_like(among)
        mask[candidates[top_k(scores[candidates], min(keep, len(candidates)))]] = True
        return mask
    order = torch.sort(scores, descending=True, stable=True).indices
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    mask[order[:keep]] = True
    return mask


def select(scores: Tensor, budget: Budget, among: Tensor, sizes: Sequence[int]) -> Tensor:
    """The best weights within a budget: `scores` and `among` over all prunable weights, layer after layer.

    >>> scores = torch.tensor([9.0, 8.0, 7.0, 1.0, 2.0])
    >>> everywhere = torch.ones(5, dtype=torch.bool)
    >>> select(scores, Budget(3), everywhere, (3, 2)).tolist()
    [True, True, True, False, False]
    >>> select(scores, Budget(3, layers=(2, 1)), everywhere, (3, 2)).tolist()
    [True, True, False, False, True]
    >>> select(scores, Budget(3, least=(0, 1)), everywhere, (3, 2)).tolist()
    [True, True, False, False, True]
    """
    if budget.layers is not None:
        return _by_layer(scores, budget.layers, among, sizes)
    if budget.least is None:
        return top_k(scores, budget.total, among)
    kept = _by_layer(scores, budget.least, among, sizes)
    return kept | top_k(scores, max(0, budget.total - int(kept.sum())), among & ~kept)


def _by_layer(scores: Tensor, counts: Sequence[int], among: Tensor, sizes: Sequence[int]) -> Tensor:
    parts = zip(scores.split(list(sizes)), counts, among.split(list(sizes)), strict=True)
    return torch.cat([top_k(score, count, here) for score, count, here in parts])
