"""Masks of many clients in one pass, for the pruners that look at a client's data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from safari.engine.stack.flat import Flat
from safari.engine.stack.random_state import Forward, RandomState
from safari.errors import PruneError
from safari.pruning import Budget, Score, select, weight_entries
from safari.pruning.attention import TwiceDifferentiable
from safari.pruning.scores import GRASP_TEMPERATURE, grasp, snip
from safari.tasks import Task

# (weights of all clients, their outputs, labels, the number of clients, task) -> scores, a row a client
StackedScore = Callable[[list[Tensor], Tensor, Tensor, int, Task], Tensor]
Scoring = Callable[[Tensor, Tensor, Tensor], Tensor]


def stacked_masks(
    flat: Flat,
    x: Tensor,
    inputs: Tensor,
    labels: Tensor,
    budget: Budget,
    support: Tensor | None,
    scoring: Scoring,
) -> Tensor:
    """`bool[clients, size]`: each client's mask on the same global model x, from its own samples.

    The same rules as `compute_mask`: exact counts, ties by index, only what is in the support (None:
    everything). `scoring` is what `score_clients` gives, or a recording of it.
    """
    layout = flat.layout
    weights = layout.prunable.to(x.device).nonzero().squeeze(1)
    everything = support is None or budget.total == layout.prunable_count
    held = torch.ones(len(weights), dtype=torch.bool, device=x.device)
    if support is not None and not everything:
        held = support[weights]
    sizes = [e.size for e in weight_entries(layout)]
    masks = torch.ones((flat.clients, layout.size), dtype=torch.bool, device=x.device)
    if budget.meets(torch.stack([part.sum() for part in held.split(sizes)]).tolist()):
        masks[:, weights] = held
        return masks
    rows = scoring(x, inputs, labels)
    if (rows.isnan() & held).any():
        raise PruneError("the pruner gave NaN as a score; does the model's output overflow?")
    if budget.layers is not None or budget.least is not None:
        masks[:, weights] = torch.stack([select(row.double(), budget, held, sizes) for row in rows])
        return masks
    # Weights without a score rank below all others.
    rows = rows.clamp(min=torch.finfo(rows.dtype).min).masked_fill(~held, -torch.inf)
    # Stable, so that equal scores keep the order of their indices.
    order = torch.sort(rows, dim=1, descending=True, stable=True).indices[:, : budget.total]
    masks[:, weights] = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, order, True)
    return masks


def stacked_score(score: Score) -> StackedScore | None:
    """The stacked form of a score, where there is one."""
    return STACKED_SCORES.get(getattr(score, "func", score))


def score_clients(
    score: StackedScore, forward: Forward, flat: Flat, device: torch.device, task: Task
) -> Scoring:
    """`(x, inputs, labels) -> [clients, weights]`: every client's scores of the prunable weights of x."""
    random_state = RandomState([0] * flat.clients, device)

    def scoring(x: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        with TwiceDifferentiable() if score is _grasp else nullcontext():
            weights, outputs = _run(forward, flat, x, inputs, random_state)
        return score(weights, outputs, labels, flat.clients, task)

    return scoring


def gradient_score(
    weights: list[Tensor], outputs: Tensor, labels: Tensor, clients: int, task: Task
) -> Tensor:
    """The gradient itself, of every client's own mean loss."""
    return _rows(_grad(_losses(outputs, labels, clients, task), weights))


def _snip(weights: list[Tensor], outputs: Tensor, labels: Tensor, clients: int, task: Task) -> Tensor:
    grads = _grad(_losses(outputs, labels, clients, task), weights)
    return _rows([(w.detach() * g).abs() for w, g in zip(weights, grads, strict=True)])


def _grasp(weights: list[Tensor], outputs: Tensor, labels: Tensor, clients: int, task: Task) -> Tensor:
    with torch.enable_grad():
        outputs = outputs / GRASP_TEMPERATURE if task.logits else outputs
    g = _grad(_losses(outputs, labels, clients, task), weights, create_graph=True)
    with torch.enable_grad():
        flow = torch.stack([(a * a.detach()).sum() for a in g]).sum()
    return _rows([w.detach() * h for w, h in zip(weights, _grad(flow, weights), strict=True)])


STACKED_SCORES: dict[Score, StackedScore] = {snip: _snip, grasp: _grasp}


def _run(
    forward: Forward, flat: Flat, x: Tensor, inputs: Tensor, random_state: RandomState
) -> tuple[list[Tensor], Tensor]:
    tensors = {}
    for e in flat.layout.entries:
        tensor = x[e.offset : e.end].view(e.shape).expand(flat.clients, *e.shape)
        # Weights are only read, and the same numbers serve all clients; a module may write to its buffers.
        tensors[e.name] = tensor.detach().requires_grad_() if e.kind == "weight" else tensor.clone()
    weights = [tensors[e.name] for e in flat.layout.entries if e.kind == "weight"]
    with torch.enable_grad():
        return weights, forward(tensors, inputs, random_state).float()


def _losses(outputs: Tensor, labels: Tensor, clients: int, task: Task) -> Tensor:
    with torch.enable_grad():
        return task.loss(outputs, labels).view(clients, -1).mean(1).sum()


def _grad(value: Tensor, weights: list[Tensor], create_graph: bool = False) -> list[Tensor]:
    if not value.requires_grad:  # nothing prunable matters to it
        return [torch.zeros_like(w) for w in weights]
    with torch.enable_grad():
        found = torch.autograd.grad(value, weights, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]


def _rows(scores: list[Tensor]) -> Tensor:
    return torch.cat([s.flatten(1) for s in scores], dim=1)
