"""All that changes from round to round, and how it becomes a checkpoint and comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from safari.aggregation import (
    Compensation,
    Server,
    gate_defaults,
    is_known,
    is_known_gate,
    is_known_step,
    rule_defaults,
    step_defaults,
    to_tensors,
    with_tensors,
)
from safari.config import Config
from safari.engine.world import World
from safari.errors import RunError, SafariError
from safari.runs import Saved, Trial
from safari.runs.checkpoint import About
from safari.runs.similarity import MATRICES, MOST_CLIENTS, due, matrix_of, to_line

_MEANINGFUL = (
    "clients",
    "cohort",
    "data",
    "partition",
    "model",
    "task",
    "pruning",
    "policy",
    "local",
    "client",
    "uplink",
    "downlink",
    "packets",
    "aggregation",
)


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

    residual = saved.tensors.get("wire.residual", state.residual)
    if residual is not None:
        # Checkpoints from before buffers were left out of it have a column for each of them too.
        residual = residual[:, : world.layout.parameters].to(world.device)
    return State(
        server=saved_server(saved, state.server, world.config, trial),
        uplink={name: tensor.numpy() for name, tensor in part("uplink.").items()},
        downlink={name: tensor.numpy() for name, tensor in part("downlink.").items()},
        # What a policy or an algorithm keeps on the host stays there.
        policy={n: part("policy.")[n].to(old.device) for n, old in state.policy.items()},
        clients={n: part("client.")[n].to(old.device) for n, old in state.clients.items()},
        mask=None if "mask" not in saved.tensors else saved.tensors["mask"].to(world.device),
        residual=residual,
        packets={name: tensor.numpy() for name, tensor in part("packets.").items()},
    )


def saved_server(saved: Saved, server: Server, config: Config, trial: Trial) -> Server:
    """The server that a checkpoint holds; RunError where the state of a server step is not in it."""
    if config.aggregation.average and "average" not in saved.tensors:
        raise RunError(
            f"{trial.checkpoint} holds no average of the models, and aggregation.average is "
            f"{config.aggregation.average}. Put 0 there, or begin a new run"
        )
    try:
        return with_tensors(server, saved.round, saved.tensors)
    except SafariError as error:
        raise RunError(
            f"{trial.checkpoint} does not fit aggregation.steps: {error}. Begin a new run"
        ) from error


def refuse_changes(saved: Saved | About, config: Config, trial: Trial) -> None:
    """RunError when a checkpoint's numbers follow from another config; it names what differs."""
    known, now = saved.facts.get("config", {}), meaning(config, trial.arm)
    if not isinstance(known, Mapping):
        raise RunError(f"{trial.checkpoint} does not say which config it was made under")
    before = dict(known)
    if before.get("rule") != now["rule"] or not is_known(now["rule"]["name"]):
        # What another rule, or other options, leave to defaults is no news; nor can it be told of a user's
        # rule that is not loaded, because a run is only looked at.
        before.pop("defaults", None)
    arm = next(a for a in config.arms if a.name == trial.arm)
    config = config.for_arm(arm)
    steps = config.aggregation.steps
    table = before.get("aggregation")
    same = isinstance(table, Mapping) and table.get("steps") == now["aggregation"]["steps"]
    if not same or not all(is_known_step(plug.name) for plug in steps):
        before.pop("step_defaults", None)
    same = isinstance(table, Mapping) and table.get("gate") == now["aggregation"]["gate"]
    if not same or not is_known_gate(config.aggregation.gate.name):
        before.pop("gate_defaults", None)
    changes = _changes(before, now)
    if changes:
        raise RunError(
            f"{trial.checkpoint} was made under another config: {'; '.join(changes)}. "
            "Put that back into config.toml, or begin a new run"
        )


def meaning(config: Config, arm: str) -> dict[str, Any]:
    """What a trial's numbers follow from. How long it runs, how often it is tested and where is left out:
    that may change between two processes."""
    own = next(a for a in config.arms if a.name == arm)
    rule, config = own.rule, config.for_arm(own)
    table, gate = config.to_dict(), config.aggregation.gate
    # How often bytes are counted changes nothing else.
    wire = {name: value for name, value in table["wire"].items() if name != "every"}
    wire["feedback"] = config.wire.feeds_back
    # With its name, so that an option that a rule did not have then counts as a change.
    defaults = {"name": rule.name, **rule_defaults(rule.name, rule.options)}
    # As pairs, so that an option that was not given then counts as a change.
    table["pruning"]["options"] = sorted(map(list, table["pruning"]["options"].items()))
    held = {name: table["evaluation"][name] for name in ("validation", "clients")}
    named: dict[str, Any] = {
        "evaluation": held,
        "wire": wire,
        "rule": {"name": rule.name, **rule.options},
        "defaults": defaults,
        "step_defaults": [
            {"name": plug.name, **step_defaults(plug.name, plug.options)} for plug in config.aggregation.steps
        ],
        "gate_defaults": {"name": gate.name, **gate_defaults(gate.name, gate.options)},
    }
    if config.policy.name != "static" or config.local.schedule != "constant":
        # Masks that come to rest and rates that fall do so by the part of the run that is over.
        named["rounds"] = config.rounds
    return {name: table[name] for name in _MEANINGFUL} | named


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    lines = []
    # Only what the checkpoint knew: a later version of the package may have fields that it had not.
    for name, old in before.items():
        new = now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            known = {key: new[key] for key in new if key in old or "name" in old}
            lines += _changes({**dict.fromkeys(known), **old}, known, f"{prefix}{name}.")
        elif old != new:
            lines.append(f"{prefix}{name} was {old!r} and is {new!r}")
    return lines
