"""The clients' side of a round, the same for both engines: their state, and what they send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from safari.engine.world import World
from safari.errors import ConfigError
from safari.training import ClientSide

Rows = Mapping[str, Tensor]


def side_of(world: World, state: Rows, down: Rows, clients: Sequence[int]) -> ClientSide:
    """What these clients have beside the model."""
    return ClientSide(state, down, world.known).rows(list(clients))


def put_rows(world: World, state: Rows, found: Rows, clients: Sequence[int]) -> dict[str, Tensor]:
    """The clients' state with the rows that their algorithm gave back."""
    rows = torch.tensor(list(clients))
    for name, old in state.items():
        due = [len(rows), *old.shape[1:]]
        got = [*found[name].shape] if name in found else None
        if got != due:
            told = "left it out" if got is None else f"gave it a shape of {got}"
            raise ConfigError(
                f"client.name: {world.config.client.name} must give back the state {name!r} of shape {due}, a row for "
                f"each client, {told}"
            )
    return {name: old.index_copy(0, rows.to(old.device), found[name].to(old)) for name, old in state.items()}


def sent_mask(world: World, mask: Tensor) -> Tensor:
    """The mask of what a client sends, which is all of it where gradients are not masked."""
    return mask if world.config.pruning.masks_gradient else torch.ones_like(mask)
