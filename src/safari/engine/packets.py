"""Uploads in packets: of the models that the uplink lets through, the parts that arrive.

The state that lasts from round to round holds the packet link's own and, under the names below, what the last
measured upload has shown about how models are cut into packets.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from safari.engine.codec import RoundCodec
from safari.engine.state import MEASURED, State
from safari.engine.world import World
from safari.errors import ConfigError
from safari.links import Packetisation, coverage, range_coverage
from safari.rounds.arrivals import Arrived
from safari.seeds import generator


def deliver(
    world: World, state: State, arrived: Arrived, codec: RoundCodec
) -> tuple[Arrived, Tensor | None, dict[str, np.ndarray]]:
    """What arrives in the end, which numbers of it came (None: all), and the next state.

    Clients from which nothing arrived are left out. Numbers that did not come are the global model's in
    `Arrived.models`, so that nobody learns from them.
    """
    link, x, t = world.packets, state.server.model, state.round
    if link.whole or state.server.rule.overrides_network:
        return arrived, None, state.packets
    if arrived.up or arrived.votes is not None:
        raise _sends_more(world)
    if not arrived.ids:
        return arrived, None, state.packets
    cut, known = _packetisation(world, state, arrived, codec)
    masks = arrived.masks.cpu().numpy()
    edges = [cut.edges(mask) for mask in masks]
    edges = edges * len(arrived.ids) if len(edges) == 1 else edges
    counts = np.zeros(len(world.parts), np.int64)
    counts[arrived.ids] = [len(own) - 1 for own in edges]
    inner = {name: array for name, array in state.packets.items() if name != MEASURED}
    codec.in_packets([link.sent(int(counts[client])) * cut.packet for client in arrived.ids])
    if link.ranges is not None:
        known_ranges, after = link.ranges(inner, t), inner
        rows = [range_coverage(cut.layout, known_ranges.get(i, ())) for i in arrived.ids]
    else:
        delivered, after = link.apply(inner, t, counts, generator(world.seed, "packets", t))
        rows = [coverage(cut.layout, own, delivered[i]) for i, own in zip(arrived.ids, edges, strict=True)]
    came = torch.from_numpy(np.stack(rows)).to(x.device)
    _keep_residuals(state.residual, codec.residual, arrived.ids, came)
    some = [row for row, own in enumerate(rows) if own.any()]
    came = came[some]
    found = Arrived(
        [arrived.ids[row] for row in some],
        torch.where(came, arrived.models[some], x),
        arrived.masks if len(arrived.masks) == 1 else arrived.masks[some],
        arrived.losses[some],
        {},
        None,
    )
    return found, came, {**after, MEASURED: known}


def _packetisation(
    world: World, state: State, arrived: Arrived, codec: RoundCodec
) -> tuple[Packetisation, np.ndarray]:
    """How models are cut, measured on the first upload in the rounds in which bytes are counted."""
    # The fields of a Packetisation, as one array.
    known = state.packets.get(MEASURED)
    model, mask = arrived.models[0], arrived.masks[0]
    if (known is None or codec.counts) and bool(torch.isfinite(model).all()):
        found = Packetisation.measure(
            model.masked_fill(~mask, 0.0).cpu().numpy(),
            mask.cpu().numpy(),
            codec.shared,
            limit=world.packets.limit,
            values=world.config.wire.values,
            lossy=codec.choices(arrived.ids[0]),
        )
        known = np.array([found.prunable, found.kept, found.dense, found.packet])
        return found, known
    if known is None:
        # A model that is not finite will be refused, whichever part of it came.
        dense = 4.0 / world.packets.limit
        known = np.array([0.0, dense, dense, float(world.packets.limit)])
    return Packetisation(codec.layout, *known.tolist()), known


def _keep_residuals(before: Tensor | None, after: Tensor | None, ids: list[int], came: Tensor) -> None:
    """Where a packet was lost, its client's residual stays as it was before the upload.

    `after`: of all clients, as if what they sent had arrived whole; changed in place. A client learns from its next
    broadcast which packets those were.
    """
    if before is not None and after is not None:
        rows, trained = torch.tensor(ids, device=after.device), after.shape[1]
        after[rows] = torch.where(came[:, :trained], after[rows], before[rows])


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
