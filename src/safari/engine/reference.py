"""Algorithm 1, one client after the other: the engine to read, and the one that others are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from safari.engine.clients import Arriving, put_rows, sent_mask, side_of
from safari.engine.codec import RoundCodec
from safari.engine.measure import Round, Stopwatch, Testing, end_round
from safari.engine.network import deliver
from safari.engine.world import World
from safari.federation import Broadcast, Federation, State, Tensors, begin
from safari.training import ClientSide, Trained, train_local


def prepare(world: World) -> Callable[[Federation, State], Round]:
    """The engine for one world; there is nothing to prepare."""
    return partial(run_round, world)


def run_round(world: World, fed: Federation, state: State) -> Round:
    """One round: the next state, the round's record, and the seconds each part took."""
    watch, before = Stopwatch(world.device), state

    # 1. The server broadcasts x; the network decides whom that reaches, and whose answer will arrive.
    state, sent = begin(fed, state)
    delivery, state = deliver(world, state, fed.rule, sent.draw.clients)
    codec = RoundCodec.of(world, state, sent)

    # 2. Each client that received it computes a mask on it and trains inside the mask (Algorithm 2).
    uploads, clients = Arriving(world, sent, delivery.arriving), state["client"]
    for client in delivery.hear:
        mask, votes = world.client_mask(sent.masks, sent.model, client, sent.round)
        watch.lap("mask")
        side = side_of(world, clients, sent.along, [client])
        trained = train(world, sent.model, mask, client, sent.round, side)
        # A client keeps what it has learned, whether or not its upload arrives.
        clients = put_rows(world, clients, trained.state, [client])
        watch.lap("train")
        # 3. The uplink delivers it, or does not.
        if client in delivery.arriving:
            kept = sent_mask(world, mask)[None]
            model = codec.up([client], trained.model[None], kept)
            loss = sent.model.new_tensor([trained.loss])
            uploads.add([client], model, kept, loss, trained.up, None if votes is None else votes[None])
            watch.lap("wire")

    # 4. The server lets arrivals stand in for the missing, and averages (Algorithm 3).
    tests = Testing(
        model=partial(world.scores, t=sent.round),
        clients=world.client_scores,
        everyone=partial(everyone, world, before["client"], sent),
    )
    state = state.put("client", clients)
    return end_round(world, fed, before, state, sent, uploads.uploads(delivery.hear), codec, tests, watch)


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


def everyone(world: World, state: Tensors, sent: Broadcast, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The models and masks of these clients in the round, whatever the network does to them."""
    x, t = sent.model, sent.round
    kept = [world.client_mask(sent.masks, x, client, t)[0] for client in clients]
    models = [
        train(world, x, mask, client, t, side_of(world, state, sent.along, [client])).model
        for client, mask in zip(clients, kept, strict=True)
    ]
    return torch.stack(models), torch.stack(kept)
