"""A user's rule tried out before the run: its first call is made in advance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from safari.aggregation import Compensation
from safari.engine.world import World
from safari.rounds.half import vectors_up
from safari.seeds import generator, torch_generator

# How many numbers a rule is tried on: few, so that trying one costs next to nothing.
_MOST_TRIED = 20_000_000


def rehearse(world: World, rule: Compensation) -> None:
    """A step of the server with the arrivals of round 0 and made-up models; it raises what the rule does."""
    cohort = world.cohort(0)
    arrived = cohort if rule.overrides_network else _first_arrivals(world, cohort)
    ids = arrived[: max(1, _MOST_TRIED // world.layout.size)]
    noise = torch.randn(len(ids), world.layout.size, generator=torch_generator(world.seed, "rehearsal"))
    sizes = vectors_up(world.client, world.layout.parameters)
    up = {name: world.start.new_zeros(len(ids), size) for name, size in sizes.items()}
    models = world.start + 0.01 * noise.to(world.device)
    world.server(rule).step_stacked(ids, models, cohort, up=up, lr=world.lr(0))


def _first_arrivals(world: World, cohort: Sequence[int]) -> list[int]:
    through = np.ones(len(world.parts), dtype=bool)
    for direction, link in (("uplink", world.uplink), ("downlink", world.downlink)):
        state = link.init(world.setting(direction))
        through &= link.apply(state, 0, generator(world.seed, direction, 0))[0]
    return [client for client in cohort if through[client]]
