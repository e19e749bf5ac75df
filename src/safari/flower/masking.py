"""Training inside a mask, for training loops that are not aware of masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from safari.errors import SafariError

# Parameters, and where they are pruned.
_Cut = list[tuple[nn.Parameter, Tensor]]


def masked(
    optimizer: torch.optim.Optimizer, module: nn.Module, masks: Mapping[str, Tensor]
) -> torch.optim.Optimizer:
    """Make an optimiser keep pruned weights at 0, and return it.

    `masks`: bool tensors for some of the module's parameters, by name, True where a weight is kept, as
    `safari.prune` and `masks_of` return them. Pruned weights are set to 0 at once. Before each step their
    gradients are zeroed, so that no momentum accumulates; after it the weights are, whatever the step did.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> _ = layer.weight.data.fill_(1.0)
    >>> optimizer = masked(
    ...     torch.optim.SGD(layer.parameters(), lr=1.0), layer, {"weight": torch.tensor([[True, False]])})
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> layer.weight.data
    tensor([[0., 0.]])
    """
    cut = _cut(module, masks)
    _cut_weights(cut)
    optimizer.register_step_pre_hook(partial(_cut_gradients, cut))
    optimizer.register_step_post_hook(partial(_cut_weights, cut))
    return optimizer


@contextmanager
def inside(module: nn.Module, masks: Mapping[str, Tensor]) -> Iterator[nn.Module]:
    """The module with its pruned weights kept at 0 under any training loop.

    Their gradients are zeroed as they are accumulated and again before a step of any optimiser, for a loop that
    assigns `.grad` itself; after the step the weights are, and at the end once more, for a loop without an optimiser.
    """
    cut = _cut(module, masks)
    handles = [
        *(
            parameter.register_post_accumulate_grad_hook(partial(_cut_gradients, [(parameter, pruned)]))
            for parameter, pruned in cut
        ),
        # Of every optimiser in this process: the function makes its own, and they touch no other module's weights.
        register_optimizer_step_pre_hook(partial(_cut_gradients, cut)),
        register_optimizer_step_post_hook(partial(_cut_weights, cut)),
    ]
    try:
        yield module
        _cut_weights(cut)
    finally:
        for handle in handles:
            handle.remove()


def _cut_gradients(cut: _Cut, *_: Any) -> None:
    for parameter, pruned in cut:
        if parameter.grad is not None:
            # A gradient that a loop assigned may be shared with others, or need a gradient itself.
            parameter.grad = parameter.grad.masked_fill(pruned, 0.0)


def _cut_weights(cut: _Cut, *_: Any) -> None:
    with torch.no_grad():
        for parameter, pruned in cut:
            parameter.masked_fill_(pruned, 0.0)


def _cut(module: nn.Module, masks: Mapping[str, Tensor]) -> _Cut:
    """Parameters with the complement of their masks; parameters of which nothing is pruned are left out."""
    parameters = dict(module.named_parameters())
    found = []
    for name, mask in masks.items():
        if name not in parameters:
            raise SafariError(f"masks: the module has no parameter {name!r}")
        parameter = parameters[name]
        if mask.dtype != torch.bool or mask.shape != parameter.shape:
            raise SafariError(
                f"masks: {name} must be bool of shape {tuple(parameter.shape)}, "
                f"got {mask.dtype} of {tuple(mask.shape)}"
            )
        if not bool(mask.all()) and parameter.requires_grad:
            found.append((parameter, ~mask.to(parameter.device)))
    return found
