"""Masks of many clients in one pass, for the pruners that look at a client's data."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from safari.engine.stack.flat import Flat
from safari.engine.stack.luck import Forward, Luck
from safari.errors import PruneError
from safari.pruning import Score, kept_count
from safari.pruning.scores import GRASP_TEMPERATURE, grasp, snip

StackedScore = Callable[[Forward, Flat, Tensor, Tensor, Tensor, Luck], Tensor]
Scoring = Callable[[Tensor, Tensor, Tensor], Tensor]


def stacked_masks(
    flat: Flat, x: Tensor, inputs: Tensor, labels: Tensor, sparsity: float, t: int, scoring: Scoring
) -> Tensor:
    """`bool[clients, size]`: each client's mask on the same global model x, from its own samples.

    The same rules as `compute_mask`: exact counts, ties by index, what is 0 after the first round stays cut.
    `scoring` is what `score_clients` gives, or a recording of it.
    """
    layout = flat.layout
    weights = layout.prunable.to(x.device).nonzero().squeeze(1)
    keep = kept_count(layout.prunable_count, sparsity)
    everything = t == 0 or keep == layout.prunable_count
    support = torch.ones(len(weights), dtype=torch.bool, device=x.device) if everything else x[weights] != 0
    masks = torch.ones((flat.clients, layout.size), dtype=torch.bool, device=x.device)
    if int(support.sum()) <= keep:
        masks[:, weights] = support
        return masks
    rows = scoring(x, inputs, labels)
    if (rows.isnan() & support).any():
        raise PruneError("the pruner gave NaN as a score; does the model's output overflow?")
    # Below every score stands what has none.
    rows = rows.clamp(min=torch.finfo(rows.dtype).min).masked_fill(~support, -torch.inf)
    # Stable, so that equal scores keep the order of their indices.
    order = torch.sort(rows, dim=1, descending=True, stable=True).indices[:, :keep]
    masks[:, weights] = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, order, True)
    return masks


def score_clients(score: Score, forward: Forward, flat: Flat, device: torch.device) -> Scoring:
    """`(x, inputs, labels) -> [clients, weights]`: every client's scores of the prunable weights of x."""
    luck = Luck([0] * flat.clients, device)
    return lambda x, inputs, labels: STACKED_SCORES[score](forward, flat, x, inputs, labels, luck)


def _snip(forward: Forward, flat: Flat, x: Tensor, inputs: Tensor, labels: Tensor, luck: Luck) -> Tensor:
    weights, logits = _run(forward, flat, x, inputs, luck)
    grads = _grad(_losses(logits, labels, flat.clients), weights)
    return _rows([(w.detach() * g).abs() for w, g in zip(weights, grads, strict=True)])


def _grasp(forward: Forward, flat: Flat, x: Tensor, inputs: Tensor, labels: Tensor, luck: Luck) -> Tensor:
    weights, logits = _run(forward, flat, x, inputs, luck)
    g = _grad(_losses(logits / GRASP_TEMPERATURE, labels, flat.clients), weights, create_graph=True)
    with torch.enable_grad():
        flow = torch.stack([(a * a.detach()).sum() for a in g]).sum()
    return _rows([w.detach() * h for w, h in zip(weights, _grad(flow, weights), strict=True)])


STACKED_SCORES: dict[Score, StackedScore] = {snip: _snip, grasp: _grasp}


def _run(forward: Forward, flat: Flat, x: Tensor, inputs: Tensor, luck: Luck) -> tuple[list[Tensor], Tensor]:
    tensors = {}
    for e in flat.layout.entries:
        tensor = x[e.offset : e.end].view(e.shape).expand(flat.clients, *e.shape)
        # Weights are only read, and the same numbers serve all clients; a module may write to its buffers.
        tensors[e.name] = tensor.detach().requires_grad_() if e.kind == "weight" else tensor.clone()
    weights = [tensors[e.name] for e in flat.layout.entries if e.kind == "weight"]
    with torch.enable_grad():
        return weights, forward(tensors, inputs, luck)


def _losses(logits: Tensor, labels: Tensor, clients: int) -> Tensor:
    with torch.enable_grad():
        return F.cross_entropy(logits.float(), labels, reduction="none").view(clients, -1).mean(1).sum()


def _grad(value: Tensor, weights: list[Tensor], create_graph: bool = False) -> list[Tensor]:
    if not value.requires_grad:  # nothing prunable matters to it
        return [torch.zeros_like(w) for w in weights]
    with torch.enable_grad():
        found = torch.autograd.grad(value, weights, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]


def _rows(scores: list[Tensor]) -> Tensor:
    return torch.cat([s.flatten(1) for s in scores], dim=1)
