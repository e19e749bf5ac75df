"""A small network and a batch for it, shared by the tests of this folder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH = (torch.linspace(-1, 1, 12).reshape(3, 4), torch.tensor([0, 1, 2]))


def small(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3, bias=False)
        )


def never(module: nn.Module, batch: object, generator: torch.Generator) -> dict[str, Tensor]:
    raise AssertionError("was scored")
