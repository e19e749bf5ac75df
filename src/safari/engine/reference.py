"""Algorithm 1, one client after the other: the engine to read, and the one that others are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from safari.engine.clients import put_rows, sent_mask, side_of
from safari.engine.closing import close_round
from safari.engine.codec import RoundCodec, adapted_levels
from safari.engine.packets import deliver
from safari.engine.state import State
from safari.engine.world import World
from safari.pruning import Masks
from safari.rounds.arrivals import Uploads, learned
from safari.rounds.masks import as_received
from safari.runs.measure import MaskCount, Stopwatch
from safari.runs.record import RoundRecord
from safari.seeds import generator
from safari.training import ClientSide, Trained, train_local


def prepare(world: World) -> Callable[[State], tuple[State, RoundRecord, dict[str, float]]]:
    """The engine for one world; there is nothing to prepare."""
    return partial(run_round, world)


def run_round(world: World, state: State) -> tuple[State, RoundRecord, dict[str, float]]:
    """One round: the next state, the round's record, and the seconds each part took."""
    t, x = state.round, state.server.model
    watch, count = Stopwatch(world.device), MaskCount(world.layout)

    # 1. The server broadcasts x; the network decides whom that reaches, and whose answer will arrive.
    masks, policy = world.masks(state.policy, x, t)
    x = as_received(x, masks)
    levels = adapted_levels(world.config.wire, state.losses)
    codec = RoundCodec(world, x, t, masks, state.residual, state.mask, levels)
    down = world.down(state.server)
    codec.beside_down(down)
    draw, sampling = world.sample(state.sampling, t)
    cohort = draw.clients
    heard, answered, uplink, downlink = network(world, state, cohort)

    # 2. Each client that received it computes a mask on it and trains inside the mask (Algorithm 2).
    uploads, clients = Uploads(), state.clients
    for client in cohort:
        if not heard[client]:
            continue
        mask, votes = world.client_mask(masks, x, client, t)
        watch.lap("mask")
        side = side_of(world, clients, down, [client])
        trained = train(world, x, mask, client, t, side)
        # A client keeps what it has learned, whether or not its upload arrives.
        clients = put_rows(world.config.client.name, clients, trained.state, [client])
        watch.lap("train")
        # 3. The uplink delivers it, or does not.
        if answered[client]:
            sent = sent_mask(world, mask)
            model = codec.up([client], trained.model[None], sent[None])
            uploads.add(client, model[0], sent, trained.loss, trained.up, votes)
            watch.lap("wire")

    # 4. The server lets arrivals stand in for the missing, and averages (Algorithm 3).
    arrived = uploads.stacked(x, None if masks.shared is None else sent_mask(world, masks.shared))
    codec.beside(arrived.up, arrived.masks, arrived.votes)
    arrived, came, packets = deliver(world, state, arrived, codec)
    for mask in arrived.masks.expand(len(arrived.ids), -1):
        count.add(mask)
    server, outcome = state.server.step_stacked(
        arrived.ids,
        arrived.models,
        cohort,
        arrived.masks,
        came,
        same_mask=masks.shared is not None,
        up=arrived.up,
        lr=world.lr(t),
        shares=draw.by_client,
    )
    return close_round(
        world,
        state,
        server,
        outcome,
        sampled=(draw, sampling),
        arrived=arrived,
        links=(uplink, downlink),
        trained=[client for client in cohort if heard[client]],
        masks=count,
        codec=codec,
        watch=watch,
        policy=learned(world.policy, policy, world.config.rounds, world.layout, server, outcome, arrived),
        clients=clients,
        mask=masks.base if masks.announced else None,
        packets=packets,
        test=partial(world.scores, t=t),
        test_clients=world.client_scores,
        everyone=partial(everyone, world, masks, state, x, t),
    )


def network(
    world: World, state: State, cohort: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Whom the broadcast reaches, whose answer would arrive, and both links' next states."""
    t = state.round
    heard, downlink = world.downlink.apply(state.downlink, t, generator(world.seed, "downlink", t))
    answered, uplink = world.uplink.apply(state.uplink, t, generator(world.seed, "uplink", t))
    rule = state.server.rule
    if rule.overrides_network and (not rule.needs_arrival or bool((heard & answered)[list(cohort)].any())):
        heard = answered = np.ones(len(world.parts), dtype=bool)
    return heard, answered, uplink, downlink


def train(
    world: World, x: Tensor, mask: Tensor, client: int, t: int, side: ClientSide | None = None
) -> Trained:
    """A client after its local steps in round t; without `side`, one of which nothing is known."""
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


def everyone(
    world: World, masks: Masks, state: State, x: Tensor, t: int, clients: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The models and masks of these clients in round t, whatever the network does to them."""
    kept = [world.client_mask(masks, x, client, t)[0] for client in clients]
    models = [
        train(
            world, x, mask, client, t, side_of(world, state.clients, world.down(state.server), [client])
        ).model
        for client, mask in zip(clients, kept, strict=True)
    ]
    return torch.stack(models), torch.stack(kept)
