"""A user's task, client algorithm or rule tried out before the run: its first call is made in advance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from safari.aggregation import RULES, Compensation
from safari.engine.clients import put_rows
from safari.engine.world import World
from safari.seeds import generator, torch_generator
from safari.training import ClientSide, evaluate, train_local

# How many numbers a rule is tried on: few, so that trying one costs next to nothing.
_MOST_TRIED = 20_000_000


def rehearse(world: World, rule: Compensation) -> None:
    """A step of the server with the arrivals of round 0 and made-up models; it raises what the rule does."""
    cohort = world.cohort(0)
    arrived = cohort if rule.overrides_network else _first_arrivals(world, cohort)
    ids = arrived[: max(1, _MOST_TRIED // world.layout.size)]
    noise = torch.randn(len(ids), world.layout.size, generator=torch_generator(world.seed, "rehearsal"))
    sizes = world.client.sends(world.layout.parameters)
    up = {name: world.start.new_zeros(len(ids), size) for name, size in sizes.items()}
    models = world.start + 0.01 * noise.to(world.device)
    world.federation(rule).server().step_stacked(ids, models, cohort, up=up, lr=world.lr(0))


def rehearse_task(world: World) -> None:
    """The loss of two samples, and a test on them; it raises what the task does."""
    x, y = (t[:2].to(world.device) for t in (world.data.train_x, world.data.train_y))
    module = world.fresh_module()
    was_training = module.training
    with torch.no_grad(), torch.random.fork_rng([]):
        # In eval mode, and of a copy: a module may write into its inputs.
        evaluate(module, x, y, len(y), task=world.task)
        world.task.loss(module(x.clone()), y)
    module.train(was_training)


def rehearse_client(world: World) -> None:
    """Two local steps of client 0 with its own client algorithm, and the server's half; it raises what they do."""
    parameters, device = world.layout.parameters, world.device
    # A client's state begins as any other's: one row, lest the rehearsal need the memory of all.
    state = world.client.init(1, parameters, device)
    half = world.client.server
    down = {} if half is None else half.down(half.init(len(world.parts), parameters, device))
    # A vector with a row for each client: the first client's.
    down = {name: tensor[:1] if tensor.ndim > 1 else tensor for name, tensor in down.items()}
    found = train_local(
        world.fresh_module(),
        world.layout,
        world.start,
        torch.ones(world.layout.size, dtype=torch.bool, device=device),
        world.training_batches(0, 0)[:2],
        optimiser=world.config.local.optimiser,
        lr=world.lr(0),
        seed=world.module_seed(0, 0),
        task=world.task,
        algorithm=world.client,
        side=ClientSide(state, down, world.known.rows([0])),
    )
    put_rows(world, state, found.state, [0])
    if half is not None:
        rehearse(world, RULES["drop"]())


def _first_arrivals(world: World, cohort: Sequence[int]) -> list[int]:
    through = np.ones(len(world.parts), dtype=bool)
    for direction, link in (("uplink", world.uplink), ("downlink", world.downlink)):
        state = link.init(world.setting(direction))
        through &= link.apply(state, 0, generator(world.seed, direction, 0))[0]
    return [client for client in cohort if through[client]]
