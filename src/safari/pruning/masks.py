"""From scores to a mask: exact counts, ties by index, and the loop of iterative pruners.

A mask is a bool vector over the whole model: True where a number is kept, and so True for everything
that is never pruned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real

import torch
from torch import Tensor, nn

from safari.errors import PruneError, one_of
from safari.models import Layout
from safari.pruning import scores as s
from safari.seeds import torch_generator


@dataclass(frozen=True)
class Pruner:
    """A score and how to use it.

    `needs_data`: the score depends on the client's batch, so that clients' masks differ.
    `iterations`: cut step by step on an exponential schedule, scoring again after each cut.
    """

    score: s.Score
    needs_data: bool = True
    iterations: int = 1

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise PruneError(f"iterations must be at least 1, got {self.iterations}")


PRUNERS: dict[str, Pruner] = {
    "rand": Pruner(s.rand, needs_data=False),
    "mag": Pruner(s.mag, needs_data=False),
    "snip": Pruner(s.snip),
    "grasp": Pruner(s.grasp),
    "synflow": Pruner(s.synflow, needs_data=False, iterations=100),
}


def as_pruner(pruner: object) -> Pruner:
    """A Pruner from a built-in's name, a Pruner, or a bare score function."""
    if isinstance(pruner, Pruner):
        return pruner
    if isinstance(pruner, str):
        if pruner not in PRUNERS:
            raise PruneError(one_of("pruner", pruner, PRUNERS))
        return PRUNERS[pruner]
    if callable(pruner):
        return Pruner(pruner)
    raise PruneError(f"pruner must be a name, a Pruner or a score function, got {pruner!r}")


def kept_count(total: int, sparsity: float, field: str = "sparsity") -> int:
    """How many of `total` weights stay: exactly round((1 - sparsity) · total), in decimal arithmetic.

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
    """True for the `keep` highest scores, earlier index first when equal; only where `among` is True.

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


def compute_mask(
    module: nn.Module,
    layout: Layout,
    vector: Tensor,
    pruner: Pruner,
    sparsity: float,
    batch: s.Batch | None,
    generator: torch.Generator,
    support: Tensor | None = None,
) -> Tensor:
    """The mask of `vector` (Algorithm 2, line 1). The module is scratch: its numbers are overwritten.

    `support` says which numbers may still be kept (in the rounds after the first: those that are not 0,
    because a weight that everybody cut stays cut). A support within the budget *is* the mask.
    """
    everywhere = layout.prunable.to(vector.device)
    keep = kept_count(layout.prunable_count, sparsity)
    if support is None or keep == layout.prunable_count:
        support = torch.ones_like(everywhere)
    start = int((support & everywhere).sum())
    # When the budget does not bind, nothing has to be scored.
    if start <= keep:
        return support | ~everywhere
    weights = everywhere.nonzero().squeeze(1)
    mask = support[weights]
    with _judged(module):
        for step in range(1, pruner.iterations + 1):
            goal = keep if step == pruner.iterations else _on_schedule(start, keep, step / pruner.iterations)
            layout.write(module, _masked(vector, weights, mask))
            found = _flat_scores(pruner.score(module, batch, generator), layout, weights)
            mask = top_k(found, goal, among=mask)
    full = torch.ones_like(everywhere)
    full[weights] = mask
    return full


def prune(
    module: nn.Module,
    *,
    pruner: str | Pruner | s.Score = "mag",
    sparsity: float = 0.8,
    batch: s.Batch | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Masks for any module, `{parameter name: bool, True = kept}`; the module is left as it was.

    `pruner` is one of rand, mag, snip, grasp, synflow, or a function `(module, batch, generator) ->
    {parameter name: scores}` of your own. snip and grasp look at `batch=(inputs, labels)`; synflow only
    at the inputs' shape. One global ranking over the weights of all convolution and linear layers;
    exactly `round((1 - sparsity) · n)` stay.

    >>> layer = nn.Linear(2, 2)
    >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, -4.0], [3.0, 2.0]]))
    >>> prune(layer, pruner="mag", sparsity=0.5)
    {'weight': tensor([[False,  True],
                       [ True, False]])}
    """
    layout = Layout.of(module)
    vector = layout.read(module)
    generator = torch_generator(seed, "pruner")
    try:
        mask = compute_mask(module, layout, vector, as_pruner(pruner), sparsity, batch, generator)
    finally:
        layout.write(module, vector)
    masks = layout.split(mask)
    return {entry.name: masks[entry.name].clone() for entry in layout.entries if entry.kind == "weight"}


def density(mask: Tensor, layout: Layout) -> float:
    """The fraction of prunable weights that a mask keeps.

    >>> density(torch.tensor([True, False, True]), Layout.of(nn.Linear(2, 1)))
    0.5
    """
    return float(mask[layout.prunable.to(mask.device)].sum()) / max(1, layout.prunable_count)


@contextmanager
def _judged(module: nn.Module) -> Iterator[None]:
    """Eval mode and gradients, whatever the caller's; each part's own mode comes back, errors or not."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.enable_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode


def _on_schedule(start: int, keep: int, part: float) -> int:
    return max(keep, round(start * math.exp(part * math.log(keep / start))))


def _masked(vector: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    out = vector.clone()
    out[weights[~mask]] = 0
    return out


def _flat_scores(found: object, layout: Layout, weights: Tensor) -> Tensor:
    """Scores as one vector over the prunable weights; a user's pruner may have got it wrong, so check."""
    if not isinstance(found, Mapping):
        raise PruneError(f"the pruner must return a dict of scores by parameter, got {found!r}")
    parts = []
    for entry in layout.entries:
        if entry.kind != "weight":
            continue
        score = found.get(entry.name)
        if score is None:
            raise PruneError(f"the pruner gave no score for {entry.name}")
        if not isinstance(score, Tensor):
            raise PruneError(
                f"the score of {entry.name} must be a tensor of shape {entry.shape}, "
                f"got {type(score).__name__}"
            )
        if tuple(score.shape) != entry.shape:
            raise PruneError(
                f"the score of {entry.name} must have shape {entry.shape}, got {tuple(score.shape)}"
            )
        parts.append(score.detach().reshape(-1).to(torch.float64))
    flat = torch.cat(parts).to(weights.device)
    if flat.isnan().any():
        raise PruneError("the pruner gave NaN as a score; does the model's output overflow?")
    return flat
