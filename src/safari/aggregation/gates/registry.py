"""Every gate by the name that a config gives it; a gate's keyword arguments are its options."""

from __future__ import annotations

from collections.abc import Callable

from safari.aggregation.compensation import Round, State
from safari.aggregation.gates.gate import Gate, Ruling
from safari.aggregation.gates.norm import norm
from safari.kinds import Kind


def off() -> Gate:
    """Every update that is finite and fits is let through."""

    def apply(state: State, round: Round) -> tuple[Ruling, State]:
        return Ruling(), state

    return Gate(lambda clients, size, device: {}, apply)


GATES: Kind[Callable[..., Gate]] = Kind(
    "gate", Gate, {"off": off, "norm": norm}, tables=("aggregation.gate",), key=""
)
