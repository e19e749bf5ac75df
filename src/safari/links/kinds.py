"""Links by name, and what the answers of a user's own must be before a round is built on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from safari.contracts import arrays, describe
from safari.errors import ConfigError
from safari.kinds import Check, Kind
from safari.links.fedawe import fedawe
from safari.links.link import Bools, Link, Setting, State
from safari.links.models import (
    bernoulli,
    come_and_go,
    gilbert_elliott,
    interleaved,
    labels,
    lost,
    perfect,
    silence,
    sine,
    staircase,
)
from safari.links.packets import PacketLink, lossy, none
from safari.links.recorded import recorded
from safari.links.trace import trace


def _first(found: Any, setting: Setting) -> State:
    return arrays("the state that init returns", found)


def _delivered(clients: int, found: Any, *given: Any) -> tuple[Bools, State]:
    fits = isinstance(found, tuple) and len(found) == 2
    delivered = found[0] if fits else found
    bools = isinstance(delivered, np.ndarray) and delivered.dtype == np.bool_
    if not fits or not bools or delivered.shape != (clients,):
        raise ConfigError(
            f"apply must return (delivered, state), delivered being a bool array with an entry for each of the "
            f"{clients} clients; got {describe(delivered)}{'' if fits else ', not a pair'}"
        )
    return delivered, arrays("the state that apply returns", found[1])


def link_contract(clients: int) -> Mapping[str, Check]:
    """Checks on what a link for this many clients returns."""
    return {"init": _first, "apply": partial(_delivered, clients)}


LINKS: Kind[Callable[..., Link]] = Kind(
    "link",
    Link,
    {
        "perfect": perfect,
        "lost": lost,
        "bernoulli": bernoulli,
        "staircase": staircase,
        "sine": sine,
        "interleaved": interleaved,
        "labels": labels,
        "gilbert-elliott": gilbert_elliott,
        "silence": silence,
        "come-and-go": come_and_go,
        "fedawe": fedawe,
        "trace": trace,
    },
    tables=("uplink", "downlink"),
)

PACKET_LINKS: Kind[Callable[..., PacketLink]] = Kind(
    "packets",
    PacketLink,
    {"none": none, "lossy": lossy, "recorded": recorded},
    tables=("packets",),
    contract={"init": _first},
)
