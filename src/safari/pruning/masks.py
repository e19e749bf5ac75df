"""From scores to a mask: exact counts, ties by index, and the loop of iterative pruners.

A mask is a bool vector over the whole model: True where a number is kept, and so True for everything
that is never pruned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from safari.errors import PruneError, one_of
from safari.kinds import Kind
from safari.models import Layout
from safari.pruning import scores as s
from safari.pruning.budget import Budget, select
from safari.pruning.scope import budget_for, weight_entries
from safari.seeds import torch_generator
from safari.tasks import Task


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


PRUNERS: Kind[Pruner] = Kind(
    "pruner",
    Pruner,
    {
        "rand": Pruner(s.rand, needs_data=False),
        "mag": Pruner(s.mag, needs_data=False),
        "snip": Pruner(s.snip),
        "grasp": Pruner(s.grasp),
        "synflow": Pruner(s.synflow, needs_data=False, iterations=100),
    },
    tables=("pruning",),
    key="pruner",
)


def for_task(pruner: Pruner, task: Task) -> Pruner:
    """The pruner, whose score takes its loss from the task where it looks at one (snip, grasp)."""
    if pruner.score in (s.snip, s.grasp):
        return replace(pruner, score=partial(pruner.score, task=task))
    return pruner


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


def compute_mask(
    module: nn.Module,
    layout: Layout,
    vector: Tensor,
    pruner: Pruner,
    budget: Budget | float,
    batch: s.Batch | None,
    generator: torch.Generator,
    support: Tensor | None = None,
) -> Tensor:
    """The mask of `vector` (Algorithm 2, line 1). The module is scratch: its numbers are overwritten.

    `budget` is how many weights stay, or a sparsity for one global ranking. `support` says which numbers may
    be kept at all (None: all); one that is within the budget *is* the mask, and nothing has to be scored.
    """
    if not isinstance(budget, Budget):
        budget = budget_for(layout, budget)
    everywhere = layout.prunable_on(vector.device)
    if support is None or budget.total == layout.prunable_count:
        support = torch.ones_like(everywhere)
    (counts,) = layout.weights_in(support)
    if budget.meets(counts):
        return _with_the_rest(support, everywhere)
    sizes = [e.size for e in weight_entries(layout)]
    weights = everywhere.nonzero().squeeze(1)
    mask = support[weights]
    with _judged(module):
        for step in range(1, pruner.iterations + 1):
            goal = budget.toward(counts, step / pruner.iterations) if step < pruner.iterations else budget
            layout.write(module, _masked(vector, weights, mask))
            found = _flat_scores(pruner.score(module, batch, generator), layout, weights)
            mask = select(found, goal, mask, sizes)
    full = torch.ones_like(everywhere)
    full[weights] = mask
    return full


def settled_mask(layout: Layout, budget: Budget, support: Tensor) -> Tensor | None:
    """The mask that `compute_mask` gives without a score, where the support is within the budget; else None."""
    everywhere = layout.prunable_on(support.device)
    if budget.total == layout.prunable_count:
        return torch.ones_like(everywhere)
    (counts,) = layout.weights_in(support)
    return _with_the_rest(support, everywhere) if budget.meets(counts) else None


def _with_the_rest(support: Tensor, prunable: Tensor) -> Tensor:
    """The support, and everything that is never pruned: `support | ~prunable`, in one operation."""
    return support >= prunable


def prune(
    module: nn.Module,
    *,
    pruner: str | Pruner | s.Score = "mag",
    sparsity: float = 0.8,
    scope: str = "global",
    dense: Sequence[str] = (),
    batch: s.Batch | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Masks for any module, `{parameter name: bool, True = kept}`; the module is left as it was.

    `pruner` is one of rand, mag, snip, grasp, synflow, or a function `(module, batch, generator) ->
    {parameter name: scores}` of your own. snip and grasp look at `batch=(inputs, labels)`; synflow only at
    the inputs' shape. Of the weights of all convolution and linear layers exactly `round((1 - sparsity) · n)`
    stay: the best of one ranking (`scope="global"`), or those of each layer with the densities of "uniform"
    or "erk". `dense` names layers of which nothing is cut: "first", "last", or names.

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
        budget = budget_for(layout, sparsity, scope, dense=dense)
        mask = compute_mask(module, layout, vector, as_pruner(pruner), budget, batch, generator)
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
