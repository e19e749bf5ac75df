"""All that changes from round to round, and how it becomes a checkpoint and comes back."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from safari.aggregation import Compensation, Server, to_tensors
from safari.engine.world import World
from safari.errors import RunError
from safari.links import LINKS, PACKET_LINKS
from safari.pruning import POLICIES
from safari.rounds.resume import checked_rule_state, fitting, meaning, refuse_changes, saved_server
from safari.runs import Saved, Trial
from safari.runs.similarity import MATRICES, MOST_CLIENTS, due, matrix_of, to_line
from safari.sampling import SAMPLINGS

# What the packets' state holds besides the link's own: how the last measured upload was cut.
MEASURED = "measured"
# The most bytes that a datagram can hold.
MOST_BYTES = 65_535


@dataclass(frozen=True)
class State:
    """A run between two rounds."""

    server: Server
    uplink: dict[str, np.ndarray]
    downlink: dict[str, np.ndarray]
    # What the mask policy carries from round to round.
    policy: dict[str, torch.Tensor] = field(default_factory=dict)
    # What the client algorithm keeps at each client, a row each.
    clients: dict[str, torch.Tensor] = field(default_factory=dict)
    # The mask that the server announced in the last round, where it does.
    mask: torch.Tensor | None = None
    # What each client's lossy uploads left out of its parameters so far, where clients keep that for later.
    residual: torch.Tensor | None = None
    # What lasts of the packets in which uploads travel, where they do.
    packets: dict[str, np.ndarray] = field(default_factory=dict)
    # What the sampling has learned of the clients.
    sampling: dict[str, torch.Tensor] = field(default_factory=dict)
    # The first and the latest mean training loss that the server has heard, NaN before any, where levels follow them.
    losses: torch.Tensor | None = None

    @property
    def average(self) -> torch.Tensor | None:
        """The running average of the global models, where the server keeps one."""
        return self.server.average

    @property
    def round(self) -> int:
        """How many rounds are done."""
        return self.server.round


def initial(world: World, rule: Compensation) -> State:
    """The state before the first round."""
    return State(
        server=world.server(rule),
        uplink=world.uplink.init(world.setting("uplink")),
        downlink=world.downlink.init(world.setting("downlink")),
        policy=dict(world.policy.init(world.layout, world.device)),
        clients=dict(world.client.init(len(world.parts), world.layout.parameters, world.device)),
        residual=world.start.new_zeros(len(world.parts), world.layout.parameters)
        if world.config.wire.feeds_back
        else None,
        packets={} if world.packets.whole else world.packets.init(world.setting("packets")),
        sampling=dict(world.sampling.init(len(world.parts), world.layout.parameters, world.device)),
        losses=None
        if world.config.wire.adapt == "none"
        else torch.full((2,), torch.nan, dtype=torch.float64),
    )


def to_saved(state: State, world: World, trial: Trial) -> Saved:
    """The state as a checkpoint."""
    tensors = to_tensors(state.server)
    links = {"uplink": state.uplink, "downlink": state.downlink, "packets": state.packets}
    for direction, link in links.items():
        # Copies: torch takes no array that runs backwards, and warns of one that is read-only.
        tensors |= {f"{direction}.{name}": torch.from_numpy(array.copy()) for name, array in link.items()}
    tensors |= {f"policy.{name}": tensor for name, tensor in state.policy.items()}
    tensors |= {f"client.{name}": tensor for name, tensor in state.clients.items()}
    tensors |= {f"sampling.{name}": tensor for name, tensor in state.sampling.items()}
    if state.mask is not None:
        tensors["mask"] = state.mask
    if state.residual is not None:
        tensors["wire.residual"] = state.residual
    if state.losses is not None:
        tensors["wire.losses"] = state.losses
    facts = {"layout": world.layout.digest, "config": meaning(world.config, trial.arm)}
    return Saved(state.round, tensors, facts)


def similarity_picture(state: State) -> dict[str, Any] | None:
    """The rule's similarity matrix as a line, in the rounds in which one is due and where it keeps one."""
    clients, known = len(state.server.weights), state.server.state
    if not due(state.round) or not 2 <= clients <= MOST_CLIENTS:
        return None
    named = {name: known[name].cpu().numpy() for name in MATRICES if name in known}
    matrix = matrix_of(named, clients)
    return None if matrix is None else to_line(state.round, matrix)


def from_saved(saved: Saved, world: World, rule: Compensation, trial: Trial) -> State:
    """The state that a checkpoint holds; RunError when it is of another model or another config."""
    model = saved.tensors.get("model")
    if (
        saved.facts.get("layout") != world.layout.digest
        or model is None
        or model.ndim != 1
        or len(model) != world.layout.size
    ):
        raise RunError(
            f"{trial.checkpoint} is of another model: names, shapes or kinds of its tensors differ"
        )
    refuse_changes(saved, world.config, trial)
    state = initial(world, rule)
    fitting(trial, "model", model, state.server.model)

    def part(prefix: str, first: Mapping[str, torch.Tensor], own: bool) -> dict[str, torch.Tensor]:
        """A part's state in the form of its first one; that of a user's own part as it was saved."""
        if own:
            # Its tensors may change their shape, go and come; what its first state does not have is put on the
            # device that computes.
            found = {n.removeprefix(prefix): t for n, t in saved.tensors.items() if n.startswith(prefix)}
            return {n: t.to(first[n].device if n in first else world.device) for n, t in found.items()}
        return {n: fitting(trial, prefix + n, saved.tensors.get(prefix + n), t) for n, t in first.items()}

    def link(
        direction: str, first: Mapping[str, np.ndarray], builtin: Container[str]
    ) -> dict[str, np.ndarray]:
        name, prefix = getattr(world.config, direction).name, f"{direction}."
        if name not in builtin:
            found = {n.removeprefix(prefix): t for n, t in saved.tensors.items() if n.startswith(prefix)}
            return {n: t.numpy() for n, t in found.items()}
        # A checkpoint holds what a trace held then.
        longer = name in ("trace", "recorded")
        expected = {n: torch.from_numpy(array.copy()) for n, array in first.items()}
        return {
            n: fitting(trial, prefix + n, saved.tensors.get(prefix + n), like, longer=longer).numpy()
            for n, like in expected.items()
        }

    residual = saved.tensors.get("wire.residual", state.residual)
    if residual is not None:
        # Checkpoints from before buffers were left out of it have a column for each of them too.
        residual = residual[:, : world.layout.parameters] if residual.ndim == 2 else residual
        like = world.start.new_empty(len(world.parts), world.layout.parameters)
        residual = fitting(trial, "wire.residual", residual, like)
    mask = saved.tensors.get("mask")
    server = saved_server(saved, state.server, world.config, trial)
    packets = link("packets", state.packets, PACKET_LINKS)
    if not world.packets.whole and (measured := saved.tensors.get(f"packets.{MEASURED}")) is not None:
        packets |= {MEASURED: _measured(measured, trial)}
    return State(
        server=checked_rule_state(server, state.server, world.config, trial),
        uplink=link("uplink", state.uplink, LINKS),
        downlink=link("downlink", state.downlink, LINKS),
        policy=part("policy.", state.policy, world.config.policy.name not in POLICIES),
        clients=part("client.", state.clients, False),
        mask=None if mask is None else fitting(trial, "mask", mask, state.server.model.bool()),
        residual=residual,
        packets=packets,
        sampling=part("sampling.", state.sampling, world.config.sampling.name not in SAMPLINGS),
        losses=None
        if state.losses is None
        else _losses(saved.tensors.get("wire.losses"), state.losses, trial),
    )


def _losses(found: torch.Tensor | None, like: torch.Tensor, trial: Trial) -> torch.Tensor:
    """The losses that the levels follow: both unknown, or both finite and above 0."""
    losses = fitting(trial, "wire.losses", found, like)
    if not bool(losses.isnan().all() or (losses.isfinite() & (losses > 0)).all()):
        raise RunError(
            f"{trial.checkpoint} is damaged: wire.losses must be above 0 and finite, got {losses.tolist()}"
        )
    return losses


def _measured(found: torch.Tensor, trial: Trial) -> np.ndarray:
    """What the last measured upload has shown: packets for a coordinate, at most one each, and bytes of a packet."""
    array = fitting(trial, f"packets.{MEASURED}", found, torch.zeros(4, dtype=torch.float64)).numpy()
    most = np.array([1.0, 1.0, 1.0, MOST_BYTES])
    if not ((array >= 0) & (array <= most * (1 + 1e-6))).all():
        raise RunError(
            f"{trial.checkpoint} is damaged: packets.{MEASURED} must lie between 0 and {most.tolist()}, "
            f"got {array.tolist()}"
        )
    return array
