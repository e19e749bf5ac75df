"""Training inside a mask, for a loop that knows nothing of masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from safari.errors import SafariError


def masked(
    optimizer: torch.optim.Optimizer, module: nn.Module, masks: Mapping[str, Tensor]
) -> torch.optim.Optimizer:
    """The same optimiser, which from now on leaves every weight at 0 that a mask cuts.

    `masks` holds a bool tensor for some of the module's parameters, True where a weight is kept, as
    `safari.prune` and `masks_of` give them. What is cut is set to 0 at once; before each step its gradient
    is, so that no momentum gathers, and after it the weight, whatever the step did.

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

    def before(*_: Any) -> None:
        for parameter, hole in cut:
            if parameter.grad is not None:
                parameter.grad.masked_fill_(hole, 0.0)

    def after(*_: Any) -> None:
        with torch.no_grad():
            for parameter, hole in cut:
                parameter.masked_fill_(hole, 0.0)

    after()
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


@contextmanager
def inside(module: nn.Module, masks: Mapping[str, Tensor]) -> Iterator[nn.Module]:
    """The module, whose gradients are 0 wherever a mask cuts: any optimiser then leaves a 0 there a 0."""

    def fill(hole: Tensor, parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.masked_fill_(hole, 0.0)

    handles = [
        parameter.register_post_accumulate_grad_hook(partial(fill, hole))
        for parameter, hole in _cut(module, masks)
    ]
    try:
        yield module
    finally:
        for handle in handles:
            handle.remove()


def _cut(module: nn.Module, masks: Mapping[str, Tensor]) -> list[tuple[nn.Parameter, Tensor]]:
    """Parameters with what their masks cut; those of which nothing is cut are left out."""
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
