"""Three models and a server for three clients, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from safari.aggregation import RULES, Outcome, Server


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


A, B, C = vector(0, 0, 3), vector(0, 4, 3), vector(12, 0, 0)
# Distances: A-B 4, A-C √(144+9) = 12.4, B-C √(144+16+9) = 13.


def start(rule: str = "safari", **options: Any) -> Server:
    # By what it is, and not by name: the simulator's oracles are rules, too.
    return Server.start(vector(1, 1, 1), 3, RULES[rule](), **options)


def sparse_step(server: Server, models: Mapping[int, Tensor], **more: Any) -> tuple[Server, Outcome]:
    """A round in which clients cut exactly what is 0 in their models."""
    return server.step(models, masks={i: model != 0 for i, model in models.items()}, **more)
