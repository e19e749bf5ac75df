"""The clients' side of a round, the same for both engines: their state, and what they send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from safari.engine.world import World
from safari.training import ClientSide

Rows = Mapping[str, Tensor]


def side_of(world: World, state: Rows, down: Rows, clients: Sequence[int]) -> ClientSide:
    """What these clients have beside the model."""
    return ClientSide(state, down, world.known).rows(list(clients))


def put_rows(state: Rows, found: Rows, clients: Sequence[int]) -> dict[str, Tensor]:
    """The clients' state with the rows that their algorithm gave back."""
    rows = torch.tensor(list(clients))
    return {name: old.index_copy(0, rows.to(old.device), found[name].to(old)) for name, old in state.items()}


def sent_mask(world: World, mask: Tensor) -> Tensor:
    """The mask of what a client sends, which is all of it where gradients are not masked."""
    return mask if world.config.pruning.masks_gradient else torch.ones_like(mask)
