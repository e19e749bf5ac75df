"""Memory of clients at the server: the last update of each, the weights it kept, and how long ago that was."""

from __future__ import annotations

import torch
from torch import Tensor

from safari.aggregation.compensation import Round, State
from safari.errors import ConfigError

# What rules with this memory name as their columns.
COLUMNS = ("updates", "kept")
# Five bytes a number of every client: 10 GB.
MOST_REMEMBERED = 2_000_000_000
# Numbers of arrivals that are turned into updates at once: 64 MB.
_AT_ONCE = 16_000_000
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


def remember(state: State, round: Round, rate: float = 1.0) -> State:
    """The memory after a round: arrivals replace their rows, in place; the others age. Updates are divided by `rate`.

    An update is taken inside the client's own mask, x_i - x where x_i is kept: on dense models this is the
    published rule, and it adds nothing to a weight that its client cut. Of buffers the value is stored, not
    the change: a change of a running variance, applied again and again, would make it negative.

    Of a number that did not come with the rest of a client's model the older update stays; where there is
    none, the client is taken to have changed nothing.
    """
    x = round.global_model.clone()
    x[round.parameters :] = 0
    at_once = max(1, _AT_ONCE // max(1, len(x)))
    for rows in (slice(start, start + at_once) for start in range(0, len(round.arrived), at_once)):
        ids, kept = round.arrived[rows], round.masks[rows]
        updates = (round.models[rows] - x) * kept
        if rate != 1:
            updates[:, : round.parameters] /= rate
        updates.clamp_(-LARGEST, LARGEST)
        if round.came is not None:
            came, heard = round.came[rows], (state["age"][ids] >= 0)[:, None]
            # Of buffers the model's own value.
            updates = torch.where(
                came, updates, torch.where(heard, state["updates"][ids], round.global_model - x)
            )
            kept = torch.where(came, kept, state["kept"][ids] | ~heard)
        state["updates"].index_copy_(0, ids, updates)
        state["kept"].index_copy_(0, ids, kept)
    age = torch.where(state["age"] >= 0, state["age"] + 1, state["age"])
    return state | {"age": age.index_fill(0, round.arrived, 0)}


def recall(state: State, round: Round, clients: Tensor, rate: float = 1.0) -> Tensor:
    """The models that these clients would have sent by memory, z_j = x + rate · y_j inside j's last mask.

    A weight that all arrivals cut is cut, as in their mean: old masks would hold the support above the
    budget, so that masks never settle, and every round would cut trained weights. A client never heard is
    assumed to have changed nothing that the arrivals kept.
    """
    x = round.global_model
    base = x.clone()
    base[round.parameters :] = 0
    alive = round.kept
    recalled = state["updates"][clients]
    if rate != 1:
        recalled[:, : round.parameters] *= rate
    recalled += base
    # Where all have one mask, the missing have it too: what came back since they were heard is unchanged.
    recalled *= alive if round.same_mask else state["kept"][clients] & alive
    recalled.clamp_(-LARGEST, LARGEST)
    never = (state["age"][clients] < 0).nonzero()[:, 0]
    return recalled.index_copy_(0, never, (x * alive).expand(len(never), -1)) if len(never) else recalled
