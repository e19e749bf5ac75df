"""What a server remembers of each client: its last update, the weights it kept, and how long ago that was."""

from __future__ import annotations

import torch
from torch import Tensor

from safari.aggregation.compensation import Round, State
from safari.errors import ConfigError

# What rules with this memory name as their columns.
COLUMNS = ("updates", "kept")
# Five bytes a number of every client: 10 GB.
MOST_REMEMBERED = 2_000_000_000
# Differences and sums of finite numbers may be infinite; what is remembered stays finite.
LARGEST = torch.finfo(torch.float32).max


def blank(clients: int, size: int, device: torch.device) -> State:
    """The memory before any client was heard; an age of -1 means never."""
    if clients * size > MOST_REMEMBERED:
        raise ConfigError(
            f"clients × model size must be at most {MOST_REMEMBERED} for a rule that remembers "
            f"every client's update, got {clients} × {size}"
        )
    return {
        "updates": torch.zeros(clients, size, device=device),
        "kept": torch.zeros(clients, size, dtype=torch.bool, device=device),
        "age": torch.full((clients,), -1, dtype=torch.int64, device=device),
    }


def remember(state: State, round: Round) -> State:
    """The memory after a round: arrivals replace their rows, the others age.

    An update is taken inside the client's own mask, x_i - x where x_i is kept: on dense models this is the
    published rule, and it adds nothing to a weight that its client cut. Of buffers the value is stored, not
    the change: a change of a running variance, applied again and again, would make it negative.

    Of a number that did not come with the rest of a client's model the older update stays; where there is
    none, the client is taken to have changed nothing.
    """
    ids, parameters = round.arrived, round.parameters
    kept = round.masks
    fresh = round.models.clone()
    fresh[:, :parameters] -= round.global_model[:parameters]
    age = torch.where(state["age"] >= 0, state["age"] + 1, state["age"])
    updates = (fresh * kept).clamp_(-LARGEST, LARGEST)
    if round.came is not None:
        x = round.global_model
        nothing = torch.cat([torch.zeros_like(x[:parameters]), x[parameters:]])
        heard = (state["age"][ids] >= 0)[:, None]
        updates = torch.where(round.came, updates, torch.where(heard, state["updates"][ids], nothing))
        kept = torch.where(round.came, kept, state["kept"][ids] | ~heard)
    return {
        "updates": state["updates"].index_copy(0, ids, updates),
        "kept": state["kept"].index_copy(0, ids, kept),
        "age": age.index_fill(0, ids, 0),
    }


def recall(state: State, round: Round, clients: Tensor) -> Tensor:
    """What these clients would have sent by memory, z_j = x + y_j inside j's last mask.

    A weight that all arrivals cut is cut, as in their mean: old masks would hold the support above the
    budget, so that masks never settle, and every round would cut trained weights. A client never heard is
    assumed to have changed nothing that the arrivals kept.
    """
    x = round.global_model
    base = x.clone()
    base[round.parameters :] = 0
    alive = round.kept
    # Where all have one mask, the missing have it too: what came back since they were heard is unchanged.
    inside = alive if round.same_mask else state["kept"][clients] & alive
    recalled = (base + state["updates"][clients]) * inside
    recalled.clamp_(-LARGEST, LARGEST)
    never = (state["age"][clients] < 0)[:, None]
    if not bool(never.any()):
        return recalled
    return torch.where(never, x * alive, recalled)
