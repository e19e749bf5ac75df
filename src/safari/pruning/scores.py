"""Importance scores of weights, one function a pruner: `(module, batch, generator) -> {name: score}`.

The module arrives in eval mode, gradients enabled, with the weights to be judged in it; higher scores
are kept. A score function leaves the module as it found it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from safari.errors import PruneError
from safari.models import prunable_parameters
from safari.pruning.attention import TwiceDifferentiable
from safari.tasks import Task, classification

Batch = tuple[Tensor, Tensor]
Score = Callable[[nn.Module, Batch | None, torch.Generator], Mapping[str, Tensor]]

GRASP_TEMPERATURE = 200.0


def rand(module: nn.Module, batch: Batch | None, generator: torch.Generator) -> dict[str, Tensor]:
    """A random rank, drawn once a run: every client and round gets the same."""
    weights = prunable_parameters(module)
    return {name: torch.rand(w.shape, generator=generator).to(w.device) for name, w in weights.items()}


def mag(module: nn.Module, batch: Batch | None, generator: torch.Generator) -> dict[str, Tensor]:
    """Magnitude: |w|."""
    return {name: w.detach().abs() for name, w in prunable_parameters(module).items()}


def snip(
    module: nn.Module, batch: Batch | None, generator: torch.Generator, *, task: Task | None = None
) -> dict[str, Tensor]:
    """SNIP (Lee et al., 2019): |w · ∂L/∂w|, how much the loss on a batch depends on the weight."""
    x, y = _need(batch, "snip")
    weights = prunable_parameters(module)
    grads = _grad((task or classification()).mean_loss(module(x), y), list(weights.values()))
    return {name: (w.detach() * g).abs() for (name, w), g in zip(weights.items(), grads, strict=True)}


def grasp(
    module: nn.Module, batch: Batch | None, generator: torch.Generator, *, task: Task | None = None
) -> dict[str, Tensor]:
    """GraSP (Wang et al., 2020): w · Hg at temperature 200, what keeps the gradient flowing."""
    x, y = _need(batch, "grasp")
    weights = prunable_parameters(module)
    tensors = list(weights.values())
    task = task or classification()
    with TwiceDifferentiable():
        outputs = module(x)
    loss = task.mean_loss(outputs / (GRASP_TEMPERATURE if task.logits else 1.0), y)
    g = _grad(loss, tensors, create_graph=True)
    flow = torch.stack([(a * a.detach()).sum() for a in g]).sum()
    hg = _grad(flow, tensors) if flow.requires_grad else [torch.zeros_like(w) for w in tensors]
    return {name: w.detach() * h for (name, w), h in zip(weights.items(), hg, strict=True)}


def synflow(module: nn.Module, batch: Batch | None, generator: torch.Generator) -> dict[str, Tensor]:
    """SynFlow (Tanaka et al., 2020): |w · ∂R/∂w|, R the sum of outputs of the net of |w| on ones; no data.

    Only the batch's shape is used. In float64, because R multiplies over the layers.
    """
    x, _ = _need(batch, "synflow")
    if not x.is_floating_point():
        raise PruneError(f"synflow feeds an input of ones, so inputs must be real numbers; got {x.dtype}")
    positive = copy.deepcopy(module).double()
    with torch.no_grad():
        for tensor in (*positive.parameters(), *positive.buffers()):
            if tensor.is_floating_point():
                tensor.abs_()
    weights = prunable_parameters(positive)
    ones = torch.ones((1, *x.shape[1:]), dtype=torch.float64, device=x.device)
    grads = _grad(positive(ones).sum(), list(weights.values()))
    return {name: (w.detach() * g).abs() for (name, w), g in zip(weights.items(), grads, strict=True)}


def _grad(value: Tensor, weights: Sequence[Tensor], create_graph: bool = False) -> list[Tensor]:
    # A weight that the output does not depend on has no gradient: its score is 0.
    grads = torch.autograd.grad(value, weights, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, grads, strict=True)]


def _need(batch: object, pruner: str) -> Batch:
    # A tensor of two samples would unpack like a pair.
    if isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(t, Tensor) for t in batch):
        return batch[0], batch[1]
    got = f"a tensor of shape {[*batch.shape]}" if isinstance(batch, Tensor) else _kinds(batch)
    raise PruneError(f"{pruner} needs batch=(inputs, labels), got {got}")


def _kinds(batch: object) -> str:
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {', '.join(type(part).__name__ for part in batch) or 'nothing'}"
    return "None" if batch is None else type(batch).__name__
