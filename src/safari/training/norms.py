"""Static batch norm, as in HeteroFL's public code (Diao et al., ICLR 2021): running statistics made for the test.

Clients whose labels differ have running statistics that differ, and their mean need not suit the mean model. So
before a test each norm's statistics are gathered anew, at the model that is tested, over training samples of all
clients:

    μ = mean of the batches' means,  σ² = mean of the batches' (unbiased) variances
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """The module's batch norms that have running statistics."""
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


@torch.no_grad()
def gather_norms(module: nn.Module, batches: Iterable[Tensor]) -> None:
    """Replace the running statistics of the module's batch norms by those of some batches, in place.

    Parameters
    ----------
    module: the model; everything but its batch norms runs in eval mode, so that dropout changes nothing.
    batches: inputs, on the module's device. A batch of one sample is left out: it has no variance.

    >>> norm = nn.BatchNorm1d(1)
    >>> gather_norms(norm, torch.tensor([[0.0], [2.0], [4.0], [8.0]]).split(2))
    >>> norm.running_mean, norm.running_var
    (tensor([3.5000]), tensor([5.]))
    """
    norms = batch_norms(module)
    if not norms:
        return
    was = module.training
    momenta = [norm.momentum for norm in norms]
    module.eval()
    for norm in norms:
        norm.reset_running_stats()
        # None: the mean over all batches, each with the same weight.
        norm.momentum = None
        norm.train()
    for batch in batches:
        if len(batch) > 1:
            module(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    module.train(was)
