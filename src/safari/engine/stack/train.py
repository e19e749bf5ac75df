"""τ local steps for many clients at once (Algorithm 2, stacked)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from safari.engine.stack.flat import Flat
from safari.engine.stack.kept import BETA1, BETA2, EPS, Kept
from safari.engine.stack.luck import Forward, Luck
from safari.pruning import Batch


def train_stacked(
    forward: Forward,
    flat: Flat,
    start: Tensor,
    masks: Tensor,
    batches: Iterable[Batch],
    steps: int,
    *,
    optimiser: str,
    lr: float,
    luck: Luck,
    frozen: Collection[str] = (),
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """From `start ⊙ mask`, a step a batch; inputs are `[clients · n, ...]`.

    `start` is one model, `masks` are `bool[clients, size]`, or one row for all. Parameters named in `frozen`
    stay as they are; `compiled` takes a step of Adam in one kernel (CUDA).
    Returns all clients' models in the order of `flat`, and each client's mean loss.
    """
    # Filled, not multiplied, here and below: 0 · inf is NaN, and 0 · -1 is -0.
    begin = flat.from_rows(start.masked_fill(~masks, 0.0).expand(flat.clients, -1))
    # Apart, because a pass writes to the buffers while the parameters wait for their gradients.
    parameters, buffers = begin[: flat.parameters], begin[flat.parameters :].clone()
    on_cpu = parameters.device.type == "cpu"
    if on_cpu:
        step_kept = Kept(parameters, flat.places(masks), optimiser=optimiser, lr=lr, steps=steps)
    else:
        kept = flat.from_rows(masks.expand(flat.clients, -1))[: flat.parameters]
        size = flat.parameters if optimiser == "adam" else 0
        moments = (parameters.new_zeros(size), parameters.new_zeros(size))
    tensors, wanted = _leaves(flat, parameters, buffers, frozen)
    losses = []
    for step, (x, y) in enumerate(batches, 1):
        gradient, loss = _gradients(forward, flat, tensors, wanted, x, y, luck)
        losses.append(loss)
        if on_cpu:
            step_kept(gradient)
        elif optimiser == "adam":
            adam_(parameters, gradient, *moments, kept, step, lr, compiled)
        else:
            parameters.add_(gradient.masked_fill_(~kept, 0.0), alpha=-lr / steps)
    begin[flat.parameters :] = buffers
    return begin, torch.stack(losses).mean(0)


def gradients(
    forward: Forward,
    flat: Flat,
    parameters: Tensor,
    buffers: Tensor,
    x: Tensor,
    y: Tensor,
    luck: Luck,
    frozen: Collection[str] = (),
) -> tuple[Tensor, Tensor]:
    """Every client's gradient of its own mean loss, in the order of `flat`, and the losses.

    The gradient of what is frozen, or does not matter to the loss, is 0.
    """
    return _gradients(forward, flat, *_leaves(flat, parameters, buffers, frozen), x, y, luck)


def _leaves(
    flat: Flat, parameters: Tensor, buffers: Tensor, frozen: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every tensor of the clients as a view that follows all steps, and those whose gradients are wanted."""
    tensors = flat.views(parameters.detach(), buffers)
    names = [e.name for e in flat.layout.entries if e.kind != "buffer" and e.name not in frozen]
    return tensors, {name: tensors[name].requires_grad_() for name in names}


def _gradients(
    forward: Forward,
    flat: Flat,
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    luck: Luck,
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        each = F.cross_entropy(forward(tensors, x, luck).float(), y, reduction="none")
    # The gradient of each client's mean.
    share = torch.full_like(each, flat.clients / len(y))
    found = torch.autograd.grad(each, list(wanted.values()), share, allow_unused=True)
    known = dict(zip(wanted, found, strict=True))
    parts = []
    for e in flat.layout.entries:
        if e.kind != "buffer":
            gradient = known.get(e.name)
            parts.append((torch.zeros_like(tensors[e.name]) if gradient is None else gradient).reshape(-1))
    return torch.cat(parts), each.detach().view(flat.clients, -1).mean(1)


def adam_(
    parameters: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    kept: Tensor,
    step: int,
    lr: float,
    compiled: bool = False,
) -> None:
    """One step of Adam in place, as torch.optim.Adam does it, with the gradient masked."""
    if compiled:
        from safari.engine.stack import fused

        fused.adam_(parameters, gradient, first, second, kept, step, lr, BETA1, BETA2, EPS)
        return
    gradient.masked_fill_(~kept, 0.0)
    first.lerp_(gradient, 1 - BETA1)
    second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
    size = lr / (1 - BETA1**step)
    denominator = (second.sqrt() / math.sqrt(1 - BETA2**step)).add_(EPS)
    parameters.addcdiv_(first, denominator, value=-size)
