"""Clients' side of a round, shared by both engines: their state, and the uploads that arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from safari.engine.world import World
from safari.errors import ConfigError
from safari.federation import Broadcast, Uploads
from safari.federation.forms import index_of
from safari.rounds.beside import rounded
from safari.training import ClientSide

Rows = Mapping[str, Tensor]


def side_of(world: World, state: Rows, down: Rows, clients: Sequence[int]) -> ClientSide:
    """Inputs of these clients beside the model."""
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


class Arriving:
    """The uploads that arrive in a round, into rows in the order of the clients, as they are trained."""

    def __init__(self, world: World, sent: Broadcast, arriving: Sequence[int]):
        x, masks = sent.model, sent.masks
        self._sent, self._ids = sent, sorted(arriving)
        self._row = {client: row for row, client in enumerate(self._ids)}
        self._models = x.new_empty((len(self._ids), len(x)))
        self._losses = x.new_empty(len(self._ids))
        self._shared = masks.shared
        if self._shared is not None:
            self._masks = sent_mask(world, self._shared)[None]
        else:
            self._masks = x.new_empty(self._models.shape, dtype=torch.bool)
        self._along: dict[str, Tensor] = {}
        self._votes = x.new_empty(self._models.shape) if masks.votes is not None else None

    def add(
        self,
        ids: Sequence[int],
        models: Tensor,
        masks: Tensor,
        losses: Tensor,
        along: Rows,
        votes: Tensor | None,
    ) -> None:
        """Copy the uploads of some clients, a row each; one row of masks may stand for all."""
        if not ids:
            return
        rows = index_of([self._row[client] for client in ids])
        self._models[rows], self._losses[rows] = models, losses
        if self._shared is None:
            self._masks[rows] = masks
        for name, vectors in along.items():
            if name not in self._along:
                self._along[name] = vectors.new_empty((len(self._ids), *vectors.shape[1:]))
            self._along[name][rows] = vectors
        if self._votes is not None and votes is not None:
            self._votes[rows] = rounded(votes)

    def uploads(self, trained: Sequence[int]) -> Uploads:
        """All uploads of the round. `trained`: the clients that received the broadcast."""
        return Uploads(
            asked=self._sent.draw.clients,
            ids=self._ids,
            models=self._models,
            masks=self._masks,
            along=self._along,
            votes=self._votes,
            losses=self._losses,
            same_mask=self._shared is not None,
            trained=trained,
        )
