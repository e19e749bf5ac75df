"""The clients' side of a round, the same for both engines: their state, their uploads, what the policy learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from safari.aggregation import Outcome, Server
from safari.engine.world import World
from safari.pruning import Arrivals
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


@dataclass(frozen=True)
class Arrived:
    """What arrived in a round, a row for each of `ids`, ascending; one row of masks may stand for all."""

    ids: list[int]
    models: Tensor
    masks: Tensor
    losses: Tensor
    up: dict[str, Tensor]
    votes: Tensor | None


@dataclass
class Uploads:
    """What arrives in a round, gathered one by one."""

    found: dict[int, tuple[Tensor, Tensor, float, Rows, Tensor | None]] = field(default_factory=dict)

    def add(
        self, client: int, model: Tensor, mask: Tensor, loss: float, up: Rows, votes: Tensor | None
    ) -> None:
        """Note an upload; `up` has one row."""
        self.found[client] = model, mask, loss, up, votes

    def stacked(self, x: Tensor, shared: Tensor | None) -> Arrived:
        """All of them, in the order of the ids. `shared`: the mask that all clients have."""
        ids = sorted(self.found)
        if not ids:
            nothing = x.new_empty((0, len(x)))
            masks = nothing.bool() if shared is None else shared[None]
            return Arrived([], nothing, masks, x.new_empty(0), {}, None)
        found = [self.found[i] for i in ids]
        votes = [vote for *_, vote in found if vote is not None]
        return Arrived(
            ids,
            torch.stack([model for model, *_ in found]),
            torch.stack([mask for _, mask, *_ in found]) if shared is None else shared[None],
            x.new_tensor([loss for _, _, loss, *_ in found], dtype=torch.float64),
            {name: torch.cat([up[name] for *_, up, _ in found]) for name in found[0][3]},
            rounded(torch.stack(votes)) if votes else None,
        )


def rounded(votes: Tensor) -> Tensor:
    """Votes as they travel: a number of 16 bits each."""
    return votes.bfloat16().to(votes.dtype)


def learned(
    world: World, policy: dict[str, Tensor], server: Server, outcome: Outcome, arrived: Arrived
) -> dict[str, Tensor]:
    """The mask policy's state after a round; what a server has refused is not learned from."""
    if outcome.lost or outcome.shares is None or outcome.own is None:
        return policy
    rows = [arrived.ids.index(client) for client in outcome.arrived]
    arrivals = Arrivals(
        number=server.round - 1,
        rounds=world.config.rounds,
        model=server.model,
        layout=world.layout,
        models=arrived.models[rows],
        weights=outcome.shares,
        own=outcome.own,
        votes=None if arrived.votes is None else arrived.votes[rows],
    )
    return dict(world.policy.learn(policy, arrivals))
