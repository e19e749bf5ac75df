"""Resuming from a checkpoint: the settings that determine its numbers, and checks that they are unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from safari.aggregation import (
    GATES,
    RULES,
    STEPS,
    Server,
    with_tensors,
)
from safari.config import Config
from safari.errors import RunError, SafariError
from safari.runs import Saved, Trial
from safari.runs.checkpoint import About

_MEANINGFUL = (
    "clients",
    "cohort",
    "sampling",
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


def saved_server(saved: Saved, server: Server, config: Config, trial: Trial) -> Server:
    """The server that a checkpoint holds; RunError where the state of a server step is not in it.

    The state of its rule is as it was saved, because clients may have become more since: see
    `checked_rule_state`.
    """
    if config.aggregation.average and "average" not in saved.tensors:
        raise RunError(
            f"{trial.checkpoint} holds no average of the models, and aggregation.average is "
            f"{config.aggregation.average}. Put 0 there, or begin a new run"
        )
    try:
        return with_tensors(server, saved.round, saved.tensors, any_form=True)
    except SafariError as error:
        raise RunError(
            f"{trial.checkpoint} does not fit aggregation.steps or the model: {error}. Begin a new run"
        ) from error


def fitting(trial: Trial, name: str, found: Tensor | None, like: Tensor, *, longer: bool = False) -> Tensor:
    """A checkpoint's tensor, on the device of the one that it continues; RunError where it is of another form.

    Args:
        trial: whose checkpoint it is.
        name: the tensor's name, for the error.
        found: the tensor; None where the checkpoint has none of this name.
        like: the part's first state, whose type and shape it must have.
        longer: the first axis may have another length, but not 0: rows of a file that may have grown since.
    """
    fits = found is not None and found.dtype == like.dtype and found.ndim == like.ndim
    if fits and found is not None:
        fits = found.shape == like.shape or (longer and len(found) > 0 and found.shape[1:] == like.shape[1:])
    if found is None or not fits:
        got = "nothing" if found is None else _form(found)
        raise RunError(f"{trial.checkpoint} is damaged: {name} must be {_form(like)}, got {got}")
    # What a part keeps on the host stays there.
    return found.to(like.device)


def checked_rule_state(server: Server, first: Server, config: Config, trial: Trial) -> Server:
    """The server, when the state of its rule has the form of the first one; a user's own rule may change its form.

    `first` is the server before the first round. RunError names what does not fit.
    """
    rule = next(arm.rule for arm in config.arms if arm.name == trial.arm)
    if rule.name not in RULES:
        return server
    state = {
        name: fitting(trial, f"rule.{name}", server.state.get(name), like)
        for name, like in first.state.items()
    }
    for name, tensor in state.items():
        # Nothing that is averaged is infinite, so neither is what is remembered of it; NaN is how some rules say
        # that they know nothing yet.
        like = first.state[name]
        if tensor.is_floating_point() and not bool(like.isnan().any()) and not bool(tensor.isfinite().all()):
            raise RunError(f"{trial.checkpoint} is damaged: rule.{name} holds numbers that are not finite")
    return replace(server, state=state)


def refuse_changes(saved: Saved | About, config: Config, trial: Trial) -> None:
    """RunError when a checkpoint's numbers follow from another config; it names what differs."""
    known, now = saved.facts.get("config", {}), meaning(config, trial.arm)
    if not isinstance(known, Mapping):
        raise RunError(f"{trial.checkpoint} does not say which config it was made under")
    before = dict(known)
    if before.get("rule") != now["rule"] or RULES.defaults(now["rule"]["name"], {}) is None:
        # What another rule, or other options, leave to defaults is no change; nor can that be known of a user's
        # rule that is not loaded, because a run is only looked at.
        before.pop("defaults", None)
    arm = next(a for a in config.arms if a.name == trial.arm)
    config = config.for_arm(arm)
    steps = config.aggregation.steps
    table = before.get("aggregation")
    same = isinstance(table, Mapping) and table.get("steps") == now["aggregation"]["steps"]
    if not same or any(STEPS.defaults(plug.name, {}) is None for plug in steps):
        before.pop("step_defaults", None)
    same = isinstance(table, Mapping) and table.get("gate") == now["aggregation"]["gate"]
    if not same or GATES.defaults(config.aggregation.gate.name, {}) is None:
        before.pop("gate_defaults", None)
    changes = _changes(before, now)
    if changes:
        raise RunError(
            f"{trial.checkpoint} was made under another config: {'; '.join(changes)}. "
            "Put that back, or begin a new run"
        )


def meaning(config: Config, arm: str) -> dict[str, Any]:
    """Settings that determine a trial's numbers.

    Its length, the rounds of its tests and its device are left out: they may change between two processes.
    """
    own = next(a for a in config.arms if a.name == arm)
    rule, config = own.rule, config.for_arm(own)
    table, gate = config.to_dict(), config.aggregation.gate
    # How often bytes are counted changes nothing else.
    wire = {name: value for name, value in table["wire"].items() if name != "every"}
    wire["feedback"] = config.wire.feeds_back
    # With its name, so that an option that a rule did not have then counts as a change.
    defaults = {"name": rule.name, **(RULES.defaults(rule.name, rule.options) or {})}
    # As pairs, so that an option that was not given then counts as a change.
    table["pruning"]["options"] = sorted(map(list, table["pruning"]["options"].items()))
    held = {name: table["evaluation"][name] for name in ("validation", "clients")}
    named: dict[str, Any] = {
        "evaluation": held,
        "wire": wire,
        "rule": {"name": rule.name, **rule.options},
        "defaults": defaults,
        "step_defaults": [
            {"name": plug.name, **(STEPS.defaults(plug.name, plug.options) or {})}
            for plug in config.aggregation.steps
        ],
        "gate_defaults": {"name": gate.name, **(GATES.defaults(gate.name, gate.options) or {})},
    }
    if config.policy.name != "static" or config.local.schedule != "constant":
        # Masks that settle and rates that fall do so by the fraction of the run that is over.
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


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {[*tensor.shape]}"
