"""Every gate by the name that a config gives it; a gate's keyword arguments are its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from safari.aggregation.compensation import Round, State
from safari.aggregation.gates.gate import Gate, Ruling
from safari.aggregation.gates.norm import norm
from safari.plugins import defaults_of, known


def off() -> Gate:
    """Every update that is finite and fits is let through."""

    def apply(state: State, round: Round) -> tuple[Ruling, State]:
        return Ruling(), state

    return Gate(lambda clients, size, device: {}, apply)


GATES: dict[str, Callable[..., Gate]] = {"off": off, "norm": norm}


def gate_defaults(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are left as the gate has them today: a later version may have others.

    >>> gate_defaults("norm", {"factor": 3.0})
    {'action': 'refuse', 'floor': 0.01}
    """
    factory = known("gate", name, GATES)
    return defaults_of(factory, given) if callable(factory) else {}
