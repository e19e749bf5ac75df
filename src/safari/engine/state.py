"""All that changes from round to round, and how it becomes a checkpoint and comes back."""

from __future__ import annotations

from typing import Any

import torch

from safari.engine.network import MEASURED, NETWORK, initial_network
from safari.engine.world import World
from safari.errors import RunError
from safari.federation import Federation, State, Tensors, init
from safari.links import LINKS, PACKET_LINKS
from safari.pruning import POLICIES
from safari.rounds.resume import checked_rule_state, fitting, meaning, refuse_changes, saved_server
from safari.runs import Saved, Trial
from safari.runs.similarity import MATRICES, MOST_CLIENTS, due, matrix_of, to_line
from safari.sampling import SAMPLINGS

# The most bytes that a datagram can hold.
MOST_BYTES = 65_535


def initial(world: World, fed: Federation) -> State:
    """The state before the first round: the federation's, the network's, and what clients remember.

    `client` is what the client algorithm keeps at each client, a row each; `wire.residual` what each client's lossy
    uploads left out of its parameters so far, where clients keep that for later.
    """
    state = init(fed)
    for part, tensors in initial_network(world).items():
        state = state.put(part, tensors)
    clients, parameters = len(world.parts), world.layout.parameters
    state = state.put("client", dict(world.client.init(clients, parameters, world.device)))
    if world.config.wire.feeds_back:
        residual = world.start.new_zeros(clients, parameters)
        state = state.put("wire", {**state["wire"], "residual": residual})
    return state


def to_saved(state: State, world: World, trial: Trial) -> Saved:
    """The state as a checkpoint: `part.name`, and the model's tensors by their names alone."""
    tensors = {
        name if part == "model" else f"{part}.{name}": tensor
        for part, named in state.parts.items()
        for name, tensor in named.items()
    }
    facts = {"layout": world.layout.digest, "config": meaning(world.config, trial.arm)}
    return Saved(state.round, tensors, facts)


def similarity_picture(state: State, clients: int) -> dict[str, Any] | None:
    """The rule's similarity matrix as a line, in the rounds in which one is due and where it keeps one."""
    known = state["rule"]
    if not due(state.round) or not 2 <= clients <= MOST_CLIENTS:
        return None
    named = {name: known[name].cpu().numpy() for name in MATRICES if name in known}
    matrix = matrix_of(named, clients)
    return None if matrix is None else to_line(state.round, matrix)


def from_saved(saved: Saved, world: World, fed: Federation, trial: Trial) -> State:
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
    config = world.config
    refuse_changes(saved, config, trial)
    first = initial(world, fed)
    fitting(trial, "model", model, first.model)
    server = saved_server(saved, fed.server(), config, trial)
    state = fed.after(first, checked_rule_state(server, fed.server(), config, trial))
    if (mask := saved.tensors.get("mask")) is not None:
        mask = fitting(trial, "mask", mask, first.model.bool())
        state = state.put("model", {**state["model"], "mask": mask})
    own = {
        "policy": config.policy.name not in POLICIES,
        "sampling": config.sampling.name not in SAMPLINGS,
        "uplink": config.uplink.name not in LINKS,
        "downlink": config.downlink.name not in LINKS,
        "packets": config.packets.name not in PACKET_LINKS,
    }
    for part in ("client", "wire", *own):
        # A trace may have grown since: a checkpoint holds what it held then.
        longer = part in own and getattr(config, part).name in ("trace", "recorded")
        state = state.put(part, _fitted(saved, world, trial, part, first[part], own.get(part, False), longer))
    if not world.packets.whole and (measured := saved.tensors.get(f"packets.{MEASURED}")) is not None:
        state = state.put("packets", {**state["packets"], MEASURED: _measured(measured, trial)})
    if "losses" in state["wire"]:
        _check_losses(state["wire"]["losses"], trial)
    return state


def _fitted(
    saved: Saved, world: World, trial: Trial, part: str, first: Tensors, own: bool, longer: bool
) -> dict[str, torch.Tensor]:
    """A part's tensors in the form of its first ones; those of a user's own part as they were saved, because they may
    change their shape, go and come."""
    prefix = f"{part}."
    if own:
        found = {n.removeprefix(prefix): t for n, t in saved.tensors.items() if n.startswith(prefix)}
        # Links compute on the host; what a part's first state does not have goes to the device that computes.
        device = torch.device("cpu") if part in NETWORK else world.device
        return {n: t.to(first[n].device if n in first else device) for n, t in found.items()}
    return {
        name: fitting(trial, prefix + name, saved.tensors.get(prefix + name), like, longer=longer)
        for name, like in first.items()
    }


def _check_losses(losses: torch.Tensor, trial: Trial) -> None:
    """The losses that the levels follow: both unknown, or both finite and above 0."""
    if not bool(losses.isnan().all() or (losses.isfinite() & (losses > 0)).all()):
        raise RunError(
            f"{trial.checkpoint} is damaged: wire.losses must be above 0 and finite, got {losses.tolist()}"
        )


def _measured(found: torch.Tensor, trial: Trial) -> torch.Tensor:
    """A checkpoint's measured packetisation, checked: at most one packet a coordinate, of a legal size."""
    measured = fitting(trial, f"packets.{MEASURED}", found, torch.zeros(4, dtype=torch.float64))
    most = torch.tensor([1.0, 1.0, 1.0, MOST_BYTES], dtype=torch.float64)
    if not bool(((measured >= 0) & (measured <= most * (1 + 1e-6))).all()):
        raise RunError(
            f"{trial.checkpoint} is damaged: packets.{MEASURED} must lie between 0 and {most.tolist()}, "
            f"got {measured.tolist()}"
        )
    return measured
