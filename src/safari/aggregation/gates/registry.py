"""Every gate by the name that a config gives it; a gate's keyword arguments are its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from safari.aggregation.compensation import Round, State
from safari.aggregation.gates.gate import Gate, Ruling
from safari.aggregation.gates.norm import norm
from safari.hosting import build, hosted
from safari.plugins import defaults_of, known


def off() -> Gate:
    """Every update that is finite and fits is let through."""

    def apply(state: State, round: Round) -> tuple[Ruling, State]:
        return Ruling(), state

    return Gate(lambda clients, size, device: {}, apply)


GATES: dict[str, Callable[..., Gate]] = {"off": off, "norm": norm}


def gate_of(name: str, options: Mapping[str, Any]) -> Gate:
    """The gate that a config names, with its options; a user's own is called under its name.

    >>> gate_of("norm", {"factor": 0.5})
    Traceback (most recent call last):
    ...
    safari.errors.ConfigError: aggregation.gate: factor must be a finite number of at least 1, got 0.5
    """
    field = "aggregation.gate"
    gate, where = build("gate", field, name, options, GATES, Gate), f"{field}: {name}"
    return replace(gate, name=where) if name in GATES else _checked(gate, where)


def _checked(gate: Gate, where: str) -> Gate:
    """A user's gate by its name; the server looks at its rulings."""
    return Gate(
        init=lambda clients, size, device: hosted(where, lambda: gate.init(clients, size, device)),
        apply=lambda state, round: hosted(where, lambda: gate.apply(state, round)),
        name=where,
    )


def is_known_gate(name: str) -> bool:
    """Can a gate's defaults be told without importing anything?"""
    return callable(known("gate", name, GATES))


def gate_defaults(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are left as the gate has them today: a later version may have others.

    >>> gate_defaults("norm", {"factor": 3.0})
    {'action': 'refuse', 'floor': 0.01}
    """
    factory = known("gate", name, GATES)
    return defaults_of(factory, given) if callable(factory) else {}
