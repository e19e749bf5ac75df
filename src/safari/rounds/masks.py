"""A round's masks: the policy's answer at the server, and what a client makes of it on its own data."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from safari.config import Pruning
from safari.errors import ConfigError
from safari.models import Layout, prunable_parameters
from safari.pruning import Batch, Budget, Masks, budget_for, sparsity_at, weight_entries
from safari.tasks import Task


def sparsity_of(pruning: Pruning, t: int) -> float:
    """The fraction that is cut in round t (counted from 0)."""
    p = pruning
    return sparsity_at(t, p.sparsity, p.schedule, initial=p.initial, begin=p.begin, end=p.end)


def budget_of(layout: Layout, pruning: Pruning, sparsity: float) -> Budget:
    """Budget of masks at a sparsity: the weights to keep in all, and perhaps in each layer."""
    p = pruning
    return budget_for(layout, sparsity, p.scope, dense=p.dense, least=p.least, prefix="pruning.")


def refuse_dead_layers(mask: Tensor, layout: Layout, pruning: Pruning, whose: str) -> None:
    """ConfigError where a first mask keeps nothing of a layer, unless that is allowed."""
    dead = [e.name for e in weight_entries(layout) if not bool(mask[e.offset : e.end].any())]
    if dead and not pruning.allow_dead_layers:
        raise ConfigError(
            f"pruning: {whose} keeps nothing of {', '.join(dead)}, so nothing would pass there: divide the cut "
            'between layers with pruning.scope = "erk", or keep some of each layer with pruning.least = 0.1 '
            "(pruning.allow_dead_layers = true runs it as it is)"
        )


def as_received(x: Tensor, masks: Masks) -> Tensor:
    """The global model as clients hold it: an announced mask travels with the model, which is 0 outside it."""
    if not masks.announced or masks.base is None:
        return x
    return x.masked_fill(~masks.base, 0.0)


def masked_gradient(
    module: nn.Module, layout: Layout, x: Tensor, base: Tensor | None, batch: Batch, task: Task
) -> Tensor:
    """The gradient of a batch's loss at the masked global model, a row: of all prunable weights, cut or not.

    In eval mode, as all scores are; 0 for what cannot be pruned. The module is scratch, but keeps its mode;
    `base` is the mask (None: nothing is cut).
    """
    layout.write(module, x if base is None else x.masked_fill(~base, 0.0))
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    inputs, labels = batch
    weights = prunable_parameters(module)
    with torch.enable_grad():
        loss = task.mean_loss(module(inputs), labels)
        found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    for part, mode in modes:
        part.training = mode
    row = torch.zeros_like(x)
    parts = layout.split(row)
    for name, gradient in zip(weights, found, strict=True):
        if gradient is not None:
            parts[name].copy_(gradient)
    return row[None]


def mask_and_votes(
    masks: Masks, gradient: Callable[[], Tensor], by_score: Callable[[Tensor | None], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """One client's mask in a round, and what it reports to the policy (None: nothing).

    `gradient()` is `masked_gradient` on the client's own data; it is taken only where the policy asks for it.
    `by_score(support)` is the client's mask by the configured score, where the policy leaves it to that.
    """
    row = gradient() if masks.needs_gradient else None
    mask = masks.shared
    if mask is None and masks.own is not None and row is not None:
        mask = masks.own(row)[0]
    elif mask is None:
        mask = by_score(masks.support)
    votes = masks.votes(row)[0] if masks.votes is not None and row is not None else None
    return mask, votes
