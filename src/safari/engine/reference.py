"""Algorithm 1, one client after the other: the engine to read, and the one that others are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from safari.engine.clients import put_rows, sent_mask, side_of
from safari.engine.closing import close_round
from safari.engine.opening import Opening, open_round
from safari.engine.state import State
from safari.engine.world import World
from safari.rounds.arrivals import Uploads
from safari.runs.measure import Stopwatch
from safari.runs.record import RoundRecord
from safari.training import ClientSide, Trained, train_local


def prepare(world: World) -> Callable[[State], tuple[State, RoundRecord, dict[str, float]]]:
    """The engine for one world; there is nothing to prepare."""
    return partial(run_round, world)


def run_round(world: World, state: State) -> tuple[State, RoundRecord, dict[str, float]]:
    """One round: the next state, the round's record, and the seconds each part took."""
    watch, t = Stopwatch(world.device), state.round

    # 1. The server broadcasts x; the network decides whom that reaches, and whose answer will arrive.
    opening = open_round(world, state)
    x, masks, codec = opening.model, opening.masks, opening.codec

    # 2. Each client that received it computes a mask on it and trains inside the mask (Algorithm 2).
    uploads, clients = Uploads(), state.clients
    for client in opening.training:
        mask, votes = world.client_mask(masks, x, client, t)
        watch.lap("mask")
        trained = train(world, x, mask, client, t, side_of(world, clients, opening.down, [client]))
        # A client keeps what it has learned, whether or not its upload arrives.
        clients = put_rows(world, clients, trained.state, [client])
        watch.lap("train")
        # 3. The uplink delivers it, or does not.
        if opening.answered[client]:
            sent = sent_mask(world, mask)
            model = codec.up([client], trained.model[None], sent[None])
            uploads.add(client, model[0], sent, trained.loss, trained.up, votes)
            watch.lap("wire")

    # 4. The server lets arrivals stand in for the missing, and averages (Algorithm 3).
    return close_round(
        world,
        opening,
        uploads.stacked(x, None if masks.shared is None else sent_mask(world, masks.shared)),
        clients,
        watch,
        test=partial(world.scores, t=t),
        test_clients=world.client_scores,
        everyone=partial(everyone, world, opening),
    )


def train(
    world: World, x: Tensor, mask: Tensor, client: int, t: int, side: ClientSide | None = None
) -> Trained:
    """A client after its local steps in round t; without `side`, one that has neither state nor label counts."""
    start, inside = x, mask
    if not world.config.pruning.masks_gradient:
        # Algorithm 2 as it is printed: masked once, at the start.
        start, inside = x.masked_fill(~mask, 0.0), torch.ones_like(mask)
    return train_local(
        world.fresh_module(),
        world.layout,
        start,
        inside,
        world.training_batches(client, t),
        optimiser=world.config.local.optimiser,
        lr=world.lr(t),
        seed=world.module_seed(client, t),
        task=world.task,
        algorithm=world.client,
        side=side,
    )


def everyone(world: World, opening: Opening, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The models and masks of these clients in the round, whatever the network does to them."""
    state, x = opening.state, opening.model
    kept = [world.client_mask(opening.masks, x, client, state.round)[0] for client in clients]
    models = [
        train(
            world, x, mask, client, state.round, side_of(world, state.clients, opening.down, [client])
        ).model
        for client, mask in zip(clients, kept, strict=True)
    ]
    return torch.stack(models), torch.stack(kept)
