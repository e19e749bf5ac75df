"""What arrives in a round, stacked, and what the mask policy learns from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from safari.aggregation import Outcome, Server
from safari.models import Layout
from safari.pruning import Arrivals, MaskPolicy
from safari.rounds.beside import rounded
from safari.sampling import Sampling

Rows = Mapping[str, Tensor]


def index_of(rows: Sequence[int]) -> slice | list[int]:
    """An index for these rows: a slice where they follow each other, which is a view and sends nothing to a device.

    >>> index_of([2, 3, 4]), index_of([0, 2])
    (slice(2, 5, None), [0, 2])
    """
    first = rows[0] if rows else 0
    neighbours = all(row == first + k for k, row in enumerate(rows))
    return slice(first, first + len(rows)) if neighbours else list(rows)


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


def learned(
    policy: MaskPolicy,
    state: dict[str, Tensor],
    rounds: int,
    layout: Layout,
    server: Server,
    outcome: Outcome,
    arrived: Arrived,
) -> dict[str, Tensor]:
    """The mask policy's state after a round; what a server has refused is not learned from.

    `state` is the one that `apply` gave at the start of the round, `server` the one after it; `rounds` is how
    many the run has.
    """
    if outcome.lost or outcome.shares is None or outcome.own is None:
        return state
    rows = _rows(outcome, arrived)
    arrivals = Arrivals(
        number=server.round - 1,
        rounds=rounds,
        model=server.model,
        layout=layout,
        models=arrived.models[rows],
        weights=outcome.shares,
        own=outcome.own,
        votes=None if arrived.votes is None else arrived.votes[rows],
    )
    return dict(policy.learn(state, arrivals))


def _rows(outcome: Outcome, arrived: Arrived) -> slice | list[int]:
    """Which of what arrived the server has let through."""
    row = {client: k for k, client in enumerate(arrived.ids)}
    return index_of([row[client] for client in outcome.arrived])


def noted(
    sampling: Sampling,
    state: dict[str, Tensor],
    x: Tensor,
    parameters: int,
    outcome: Outcome,
    arrived: Arrived,
) -> dict[str, Tensor]:
    """The sampling's state after a round; what a server has refused is not noted.

    `x` is the global model of the round. Where an upload came in part, the rest of it counts as unchanged.
    """
    if sampling.learn is None or outcome.lost:
        return state
    rows = _rows(outcome, arrived)
    masks = arrived.masks if len(arrived.masks) == 1 else arrived.masks[rows]
    updates = (arrived.models[rows, :parameters] - x[:parameters]) * masks[:, :parameters]
    return dict(sampling.learn(state, torch.tensor(outcome.arrived, device=x.device), updates))
