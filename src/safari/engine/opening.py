"""How a round begins, in every engine: step 1 of Algorithm 1, with all that is drawn before a client trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from safari.engine.codec import RoundCodec, adapted_levels
from safari.engine.state import State
from safari.engine.world import World
from safari.pruning import Masks
from safari.rounds.masks import as_received
from safari.sampling import Draw
from safari.sampling import State as SamplingState
from safari.seeds import generator

Link = dict[str, np.ndarray]


@dataclass(frozen=True)
class Opening:
    """A round in which the server has broadcast and nobody has trained yet.

    Args:
        state: The state before the round.
        model: The global model as clients receive it.
        masks: What clients know of their masks.
        policy: The mask policy's next state, before it learns from what arrives.
        down: What travels beside the model.
        codec: The round's messages.
        draw: Who is asked.
        sampling: The sampling's next state, before it has heard from them.
        heard: `bool[all clients]`: whom the broadcast reaches.
        answered: `bool[all clients]`: whose upload would arrive.
        links: The next states of uplink and downlink.
    """

    state: State
    model: Tensor
    masks: Masks
    policy: dict[str, Tensor]
    down: Mapping[str, Tensor]
    codec: RoundCodec
    draw: Draw
    sampling: SamplingState
    heard: np.ndarray
    answered: np.ndarray
    links: tuple[Link, Link]

    @property
    def training(self) -> list[int]:
        """Who is asked and receives the broadcast."""
        return [client for client in self.draw.clients if self.heard[client]]


def open_round(world: World, state: State) -> Opening:
    """The server broadcasts x; the network decides whom that reaches, and whose answer will arrive."""
    t, x = state.round, state.server.model
    masks, policy = world.masks(state.policy, x, t)
    x = as_received(x, masks)
    levels = adapted_levels(world.config.wire, state.losses)
    codec = RoundCodec(world, x, t, masks, state.residual, state.mask, levels)
    down = world.down(state.server)
    codec.beside_down(down)
    draw, sampling = world.sample(state.sampling, t)
    heard, answered, uplink, downlink = network(world, state, draw.clients)
    return Opening(state, x, masks, policy, down, codec, draw, sampling, heard, answered, (uplink, downlink))


def network(world: World, state: State, cohort: Sequence[int]) -> tuple[np.ndarray, np.ndarray, Link, Link]:
    """Whom the broadcast reaches, whose answer would arrive, and both links' next states."""
    t = state.round
    heard, downlink = world.downlink.apply(state.downlink, t, generator(world.seed, "downlink", t))
    answered, uplink = world.uplink.apply(state.uplink, t, generator(world.seed, "uplink", t))
    rule = state.server.rule
    if rule.overrides_network and (not rule.needs_arrival or bool((heard & answered)[list(cohort)].any())):
        heard = answered = np.ones(len(world.parts), dtype=bool)
    return heard, answered, uplink, downlink
