"""The simulator's network, between a broadcast and the uploads: whom it reaches, and what comes back.

A federation knows nothing of it: a real network takes its place. The state that lasts from round to round is that of
the links and of the packets; with the packets' own is kept what the last measured upload has shown about how models are
cut into packets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from safari.aggregation import Compensation
from safari.engine.codec import RoundCodec
from safari.engine.world import World
from safari.errors import ConfigError
from safari.federation import State, Tensors, Uploads
from safari.links import Packetisation, coverage, range_coverage
from safari.seeds import generator

# What the packets' state holds besides the link's own: how the last measured upload was cut.
MEASURED = "measured"
# The parts of the state that are the network's.
NETWORK = ("uplink", "downlink", "packets")

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Delivery:
    """Fate of a round's messages, decided before any client trains.

    Args:
        hear: Clients, of those asked, that the broadcast reaches.
        arriving: Clients whose upload then arrives.
    """

    hear: list[int]
    arriving: list[int]


def arrays(tensors: Tensors) -> Arrays:
    """A link's state as it wants it."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def tensors(state: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """A link's state as the federation's state holds it."""
    # Copies: torch takes no array that runs backwards, and warns of one that is read-only.
    return {name: torch.from_numpy(array.copy()) for name, array in state.items()}


def initial_network(world: World) -> dict[str, dict[str, Tensor]]:
    """The links and packets before the first round."""
    packets = {} if world.packets.whole else world.packets.init(world.setting("packets"))
    return {
        "uplink": tensors(world.uplink.init(world.setting("uplink"))),
        "downlink": tensors(world.downlink.init(world.setting("downlink"))),
        "packets": tensors(packets),
    }


def deliver(world: World, state: State, rule: Compensation, asked: Sequence[int]) -> tuple[Delivery, State]:
    """Draw the clients that receive the broadcast and those whose upload will arrive; also the next state.

    A rule that overrides the network is an oracle: it asks for what did not arrive, too.
    """
    t, through = state.round, {}
    for direction, link in (("downlink", world.downlink), ("uplink", world.uplink)):
        rng = generator(world.seed, direction, t)
        through[direction], after = link.apply(arrays(state[direction]), t, rng)
        state = state.put(direction, tensors(after))
    heard, answered = through["downlink"], through["uplink"]
    if rule.overrides_network and (not rule.needs_arrival or bool((heard & answered)[list(asked)].any())):
        heard = answered = np.ones(len(world.parts), dtype=bool)
    hear = [client for client in asked if heard[client]]
    return Delivery(hear, [client for client in hear if answered[client]]), state


def in_packets(
    world: World, state: State, rule: Compensation, got: Uploads, codec: RoundCodec
) -> tuple[Uploads, State]:
    """Deliver uploads in packets: return those that arrive, perhaps in part, and the next state.

    Clients from which nothing arrived are left out.
    """
    link, t = world.packets, state.round
    if link.whole or rule.overrides_network:
        return got, state
    if got.along or got.votes is not None:
        raise _sends_more(world)
    if not got.ids:
        return got, state
    cut, known = _packetisation(world, state, got, codec)
    masks = got.masks.cpu().numpy()
    edges = [cut.edges(mask) for mask in masks]
    edges = edges * len(got.ids) if len(edges) == 1 else edges
    counts = np.zeros(len(world.parts), np.int64)
    counts[list(got.ids)] = [len(own) - 1 for own in edges]
    inner = arrays(state["packets"])
    inner.pop(MEASURED, None)
    codec.in_packets([link.sent(int(counts[client])) * cut.packet for client in got.ids])
    if link.ranges is not None:
        known_ranges, after = link.ranges(inner, t), inner
        rows = [range_coverage(cut.layout, known_ranges.get(i, ())) for i in got.ids]
    else:
        delivered, after = link.apply(inner, t, counts, generator(world.seed, "packets", t))
        rows = [coverage(cut.layout, own, delivered[i]) for i, own in zip(got.ids, edges, strict=True)]
    received = torch.from_numpy(np.stack(rows)).to(got.models.device)
    _keep_residuals(state["wire"].get("residual"), codec.residual, got.ids, received)
    some = [row for row, own in enumerate(rows) if own.any()]
    got = replace(
        got,
        ids=[got.ids[row] for row in some],
        models=got.models[some],
        masks=got.masks if len(got.masks) == 1 else got.masks[some],
        losses=None if got.losses is None else got.losses[some],
        received=received[some],
    )
    return got, state.put("packets", tensors({**after, MEASURED: known}))


def _packetisation(
    world: World, state: State, got: Uploads, codec: RoundCodec
) -> tuple[Packetisation, np.ndarray]:
    """Packetisation of models, measured on the first upload of each round in which bytes are counted."""
    # The fields of a Packetisation, as one array.
    known = arrays(state["packets"]).get(MEASURED)
    model, mask = got.models[0], got.masks[0]
    if (known is None or codec.counts) and bool(torch.isfinite(model).all()):
        found = Packetisation.measure(
            model.masked_fill(~mask, 0.0).cpu().numpy(),
            mask.cpu().numpy(),
            codec.shared,
            limit=world.packets.limit,
            values=world.config.wire.values,
            lossy=codec.choices(got.ids[0]),
        )
        known = np.array([found.prunable, found.kept, found.dense, found.packet])
        return found, known
    if known is None:
        # A model that is not finite will be refused, whichever part of it came.
        dense = 4.0 / world.packets.limit
        known = np.array([0.0, dense, dense, float(world.packets.limit)])
    return Packetisation(codec.layout, *known.tolist()), known


def _keep_residuals(
    before: Tensor | None, after: Tensor | None, ids: Sequence[int], received: Tensor
) -> None:
    """Undo the change of a client's residual wherever its packet was lost.

    `after`: residuals of all clients, as if their uploads had arrived whole; changed in place. A client
    learns from its next broadcast which packets were lost.
    """
    if before is not None and after is not None:
        rows, trained = torch.tensor(list(ids), device=after.device), after.shape[1]
        after[rows] = torch.where(received[:, :trained], after[rows], before[rows])


def _sends_more(world: World) -> ConfigError:
    return ConfigError(
        "packets.name must be 'none' where clients send something beside their model, got "
        f"{world.config.packets.name!r}: client {world.config.client.name}, policy {world.config.policy.name}"
    )


def check_packets(world: World) -> None:
    """ConfigError for what does not go together with packets.

    Votes of a policy that does not say that it has any are found in the first round with some.
    """
    lossy = not world.packets.whole and any(not rule.overrides_network for rule in world.rules.values())
    if lossy and (world.policy.votes or world.client.sends(world.layout.parameters)):
        raise _sends_more(world)
    if world.packets.rounds is not None:
        rounds = world.packets.rounds(world.packets.init(world.setting("packets")))
        if rounds < world.config.rounds:
            raise ConfigError(
                f"rounds must be at most the {rounds} that packets has, got {world.config.rounds}"
            )
