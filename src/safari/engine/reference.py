"""Algorithm 1, one client after the other: the engine to read, and the one that others are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from safari.engine.closing import close_round
from safari.engine.mail import Mail
from safari.engine.state import State
from safari.engine.world import World
from safari.runs.measure import MaskCount, Stopwatch
from safari.runs.record import RoundRecord
from safari.seeds import generator
from safari.training import train_local


def prepare(world: World) -> Callable[[State], tuple[State, RoundRecord, dict[str, float]]]:
    """The engine for one world; there is nothing to prepare."""
    return partial(run_round, world)


def run_round(world: World, state: State) -> tuple[State, RoundRecord, dict[str, float]]:
    """One round: the next state, the round's record, and the seconds each part took."""
    t, x = state.round, state.server.model
    watch = Stopwatch(world.device)
    masks, mail = MaskCount(world.layout), Mail(world, x, t, state.residual)

    # 1. The server broadcasts x; the network decides whom that reaches, and whose answer will arrive.
    cohort = world.cohort(t)
    heard, answered, uplink, downlink = network(world, state)

    # 2. Each client that received it computes a mask on it and trains inside the mask (Algorithm 2).
    received: dict[int, Tensor] = {}
    kept: dict[int, Tensor] = {}
    losses: list[float] = []
    shared: Tensor | None = None
    for client in cohort:
        if not heard[client]:
            continue
        if shared is None or world.pruner.needs_data:
            shared = world.mask(x, client, t)
        mask = shared
        watch.lap("mask")
        model, loss = train(world, x, mask, client, t)
        watch.lap("train")
        # 3. The uplink delivers it, or does not.
        if answered[client]:
            received[client] = mail.up([client], model[None], mask[None])[0]
            kept[client] = mask
            watch.lap("wire")
            losses.append(loss)
            masks.add(mask)

    # 4. The server lets arrivals stand in for the missing, and averages (Algorithm 3).
    server, outcome = state.server.step(received, cohort, kept)
    return close_round(
        world,
        state,
        server,
        outcome,
        links=(uplink, downlink),
        trained=[client for client in cohort if heard[client]],
        losses=losses,
        masks=masks,
        mail=mail,
        watch=watch,
        test=partial(world.scores, t=t),
        everyone=partial(everyone, world, x, t),
    )


def network(
    world: World, state: State
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Whom the broadcast reaches, whose answer would arrive, and both links' next states."""
    t = state.round
    heard, downlink = world.downlink.apply(state.downlink, t, generator(world.seed, "downlink", t))
    answered, uplink = world.uplink.apply(state.uplink, t, generator(world.seed, "uplink", t))
    if state.server.rule.overrides_network:
        heard = answered = np.ones(len(world.parts), dtype=bool)
    return heard, answered, uplink, downlink


def train(world: World, x: Tensor, mask: Tensor, client: int, t: int) -> tuple[Tensor, float]:
    """A client's model after its local steps in round t, and its mean loss."""
    return train_local(
        world.fresh_module(),
        world.layout,
        x,
        mask,
        world.training_batches(client, t),
        optimiser=world.config.local.optimiser,
        lr=world.config.local.lr,
        seed=world.module_seed(client, t),
    )


def everyone(world: World, x: Tensor, t: int, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The models and masks of these clients in round t, whatever the network does to them."""
    masks = [world.mask(x, client, t) for client in clients]
    models = [train(world, x, mask, client, t)[0] for client, mask in zip(clients, masks, strict=True)]
    return torch.stack(models), torch.stack(masks)
