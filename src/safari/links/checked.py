"""A link that a config names, and a user's link whose every answer is looked at before a round is built on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from safari.errors import ConfigError
from safari.hosting import build, hosted
from safari.links.link import Link
from safari.links.models import LINKS


def link_of(direction: str, name: str, options: Mapping[str, Any], clients: int) -> Link:
    """The link of a direction ("uplink", "downlink"), by name."""
    link = build("link", direction, name, options, LINKS, Link)
    return link if name in LINKS else checked_link(link, f"{direction}.name: {name}", clients)


def checked_link(link: Link, where: str, clients: int) -> Link:
    """The link, with answers of the wrong form refused; `where` is what messages begin with."""

    def apply(
        state: dict[str, np.ndarray], t: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        found: Any = hosted(where, lambda: link.apply(state, t, rng))
        fits = isinstance(found, tuple) and len(found) == 2
        delivered = found[0] if fits else found
        if not fits or not _is_bools(delivered, clients):
            raise ConfigError(
                f"{where}: apply must return (delivered, state), delivered being a bool array with an entry "
                f"for each of the {clients} clients; got {_form(delivered)}{'' if fits else ', not a pair'}"
            )
        return delivered, check_arrays(where, "apply", found[1])

    return replace(link, apply=apply)


def check_arrays(where: str, function: str, state: Any) -> dict[str, np.ndarray]:
    """A link's state, when a checkpoint can hold it."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"{where}: the state that {function} returns must be a dict, got {_form(state)}")
    for name, value in state.items():
        numeric = isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative
        if not isinstance(name, str) or not numeric:
            raise ConfigError(
                f"{where}: the state that {function} returns must hold numpy arrays of numbers by name, "
                f"got {_form(value)} as {name!r}"
            )
    return dict(state)


def _is_bools(found: Any, clients: int) -> bool:
    return isinstance(found, np.ndarray) and found.dtype == np.bool_ and found.shape == (clients,)


def _form(found: Any) -> str:
    if hasattr(found, "dtype") and hasattr(found, "shape"):
        return f"{type(found).__name__} of {found.dtype} and shape {[*found.shape]}"
    return "None" if found is None else type(found).__name__
