"""All that changes from round to round, and how it becomes a checkpoint and comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from safari.aggregation import Compensation, Server, to_tensors
from safari.engine.world import World
from safari.errors import RunError
from safari.pruning import POLICIES
from safari.rounds.resume import meaning, refuse_changes, saved_server
from safari.runs import Saved, Trial
from safari.runs.similarity import MATRICES, MOST_CLIENTS, due, matrix_of, to_line


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
    if state.mask is not None:
        tensors["mask"] = state.mask
    if state.residual is not None:
        tensors["wire.residual"] = state.residual
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
    if saved.facts.get("layout") != world.layout.digest or model is None or len(model) != world.layout.size:
        raise RunError(
            f"{trial.checkpoint} is of another model: names, shapes or kinds of its tensors differ"
        )
    refuse_changes(saved, world.config, trial)
    state = initial(world, rule)

    def part(name: str) -> dict[str, torch.Tensor]:
        return {k.removeprefix(name): v for k, v in saved.tensors.items() if k.startswith(name)}

    def fitting(name: str, found: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        if found is None or found.shape != like.shape or found.dtype != like.dtype:
            got = "nothing" if found is None else _form(found)
            raise RunError(f"{trial.checkpoint} is damaged: {name} must be {_form(like)}, got {got}")
        # What a policy or an algorithm keeps on the host stays there.
        return found.to(like.device)

    def policy_tensor(name: str, like: torch.Tensor) -> torch.Tensor:
        found = saved.tensors.get(f"policy.{name}")
        if found is not None and world.config.policy.name not in POLICIES:
            # Those of a user's policy may change their shape.
            return found.to(like.device)
        return fitting(f"policy.{name}", found, like)

    residual = saved.tensors.get("wire.residual", state.residual)
    if residual is not None:
        # Checkpoints from before buffers were left out of it have a column for each of them too.
        residual = residual[:, : world.layout.parameters] if residual.ndim == 2 else residual
        like = world.start.new_empty(len(world.parts), world.layout.parameters)
        residual = fitting("wire.residual", residual, like)
    mask = saved.tensors.get("mask")
    return State(
        server=saved_server(saved, state.server, world.config, trial),
        uplink={name: tensor.numpy() for name, tensor in part("uplink.").items()},
        downlink={name: tensor.numpy() for name, tensor in part("downlink.").items()},
        policy={name: policy_tensor(name, like) for name, like in state.policy.items()},
        clients={
            name: fitting(f"client.{name}", saved.tensors.get(f"client.{name}"), like)
            for name, like in state.clients.items()
        },
        mask=None if mask is None else fitting("mask", mask, state.server.model.bool()),
        residual=residual,
        packets={name: tensor.numpy() for name, tensor in part("packets.").items()},
    )


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {[*tensor.shape]}"
