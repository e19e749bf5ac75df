"""All that changes from round to round, and how it becomes a checkpoint and comes back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from safari.aggregation import Compensation, Server
from safari.engine.world import World
from safari.errors import RunError
from safari.runs import Saved


@dataclass(frozen=True)
class State:
    """A run between two rounds."""

    server: Server
    uplink: dict[str, np.ndarray]
    downlink: dict[str, np.ndarray]

    @property
    def round(self) -> int:
        """How many rounds are done."""
        return self.server.round


def initial(world: World, rule: Compensation) -> State:
    """The state before the first round."""
    server = Server.start(
        world.start,
        len(world.parts),
        rule,
        weights=world.client_weights,
        parameters=world.layout.parameters,
    )
    return State(
        server=server,
        uplink=world.uplink.init(world.setting("uplink")),
        downlink=world.downlink.init(world.setting("downlink")),
    )


def to_saved(state: State, world: World) -> Saved:
    """The state as a checkpoint."""
    tensors = {"model": state.server.model}
    tensors |= {f"rule.{name}": tensor for name, tensor in state.server.state.items()}
    for direction, link in (("uplink", state.uplink), ("downlink", state.downlink)):
        tensors |= {f"{direction}.{name}": torch.from_numpy(array) for name, array in link.items()}
    facts = {"layout": world.layout.digest, "config": world.config.digest}
    return Saved(state.round, tensors, facts)


def from_saved(saved: Saved, world: World, rule: Compensation) -> State:
    """The state that a checkpoint holds; RunError when it is of another model."""
    if saved.facts.get("layout") != world.layout.digest:
        raise RunError("the checkpoint is of another model: names, shapes or kinds of its tensors differ")
    state = initial(world, rule)

    def part(name: str) -> dict[str, torch.Tensor]:
        return {k.removeprefix(name): v for k, v in saved.tensors.items() if k.startswith(name)}

    server = replace(
        state.server,
        model=saved.tensors["model"].to(world.device),
        round=saved.round,
        state={name: tensor.to(world.device) for name, tensor in part("rule.").items()},
    )
    return State(
        server=server,
        uplink={name: tensor.numpy() for name, tensor in part("uplink.").items()},
        downlink={name: tensor.numpy() for name, tensor in part("downlink.").items()},
    )
