"""Masks computed another way, from the definitions, to compare the package's with.

Nothing here comes from safari. The network is called functionally, with a gate on every weight
(w · c, c = 1), so that a score is a derivative with respect to the gate; second derivatives go forward
over reverse; ranks come from sorting Python tuples.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

Scores = dict[str, Tensor]


def weight_names(module: nn.Module) -> list[str]:
    """Weights of convolutions and linear layers, in the order of named_parameters."""
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    mine = {f"{name}.weight".lstrip(".") for name, m in module.named_modules() if isinstance(m, layers)}
    return [name for name, _ in module.named_parameters() if name in mine]


def call(module: nn.Module, weights: Scores, gates: Scores, x: Tensor) -> Tensor:
    """The network's output in eval mode with gated weights; the module's own numbers are not touched."""
    rest = {k: v.detach() for k, v in module.state_dict().items()}
    gated = {name: weights[name] * gates[name] for name in weights}
    return functional_call(module, {**rest, **gated}, (x,))


def weights_of(module: nn.Module) -> Scores:
    state = module.state_dict()
    return {name: state[name].detach().clone() for name in weight_names(module)}


def ones_like(weights: Scores) -> Scores:
    return {name: torch.ones_like(w) for name, w in weights.items()}


def random_scores(module: nn.Module, generator: torch.Generator) -> Scores:
    return {name: torch.rand(w.shape, generator=generator) for name, w in weights_of(module).items()}


def magnitude_scores(module: nn.Module) -> Scores:
    return {name: w.double().square().sqrt() for name, w in weights_of(module).items()}


def snip_scores(module: nn.Module, x: Tensor, y: Tensor) -> Scores:
    """|∂L/∂c| at c = 1, which is SNIP's definition."""
    weights = weights_of(module)
    by_gate = grad(lambda gates: F.cross_entropy(call(module, weights, gates, x), y))(ones_like(weights))
    return {name: g.abs() for name, g in by_gate.items()}


def grasp_scores(module: nn.Module, x: Tensor, y: Tensor, temperature: float = 200.0) -> Scores:
    """θ · Hg: the Hessian times the gradient as the derivative of the gradient along the gradient."""
    weights = weights_of(module)
    ones = ones_like(weights)

    def loss(w: Scores) -> Tensor:
        return F.cross_entropy(call(module, w, ones, x) / temperature, y)

    along = grad(loss)(weights)
    _, hessian_gradient = jvp(grad(loss), (weights,), (along,))
    return {name: weights[name] * hessian_gradient[name] for name in weights}


def synflow_masks(module: nn.Module, input_shape: tuple[int, ...], keep: int, steps: int = 100) -> Scores:
    """Gates of 0 and 1 on |θ|; after each step the gates of the weakest close, on an exponential schedule."""
    positive = {k: v.double().abs() for k, v in module.state_dict().items()}
    weights = {name: positive[name] for name in weight_names(module)}
    gates = ones_like(weights)
    ones = torch.ones((1, *input_shape), dtype=torch.float64)
    total = sum(w.numel() for w in weights.values())

    def flow(g: Scores) -> Tensor:
        gated = {name: weights[name] * g[name] for name in weights}
        return functional_call(module, {**positive, **gated}, (ones,)).sum()

    for step in range(1, steps + 1):
        goal = max(keep, round(total * (keep / total) ** (step / steps))) if step < steps else keep
        scores = grad(flow)(gates)
        score = torch.cat([s.reshape(-1) for s in scores.values()]).abs().numpy()
        is_open = torch.cat([g.reshape(-1) for g in gates.values()]).numpy() > 0
        flat = torch.from_numpy(above_threshold(np.where(is_open, score, -1.0), goal).astype(np.float64))
        gates = split(flat, weights)
    return {name: g.bool() for name, g in gates.items()}


def split(flat: Tensor, like: Scores) -> Scores:
    parts = flat.split([t.numel() for t in like.values()])
    return {name: part.reshape(t.shape) for (name, t), part in zip(like.items(), parts, strict=True)}


def kept(total: int, sparsity: str) -> int:
    """round((1 - α) n) with α as written in decimals; a half goes to the even number."""
    exact = (1 - Fraction(sparsity)) * total
    low = math.floor(exact)
    half = exact - low
    return low + (half > Fraction(1, 2) or (half == Fraction(1, 2) and low % 2 == 1))


def highest(scores: Scores, keep: int) -> Scores:
    """True for the `keep` highest over all tensors, earlier first when equal."""
    flat = torch.cat([s.reshape(-1) for s in scores.values()]).tolist()
    winners = [i for _, i in sorted((-s, i) for i, s in enumerate(flat))[:keep]]
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[winners] = True
    return split(mask, scores)


def above_threshold(scores: np.ndarray, keep: int) -> np.ndarray:
    """The same without sorting: all above the keep-th highest score, and the earliest equal to it."""
    edge = np.partition(scores, len(scores) - keep)[len(scores) - keep]
    mask = scores > edge
    mask[np.flatnonzero(scores == edge)[: keep - int(mask.sum())]] = True
    return mask
