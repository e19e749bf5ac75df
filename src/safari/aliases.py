"""Names that other frameworks use for fields and rules: understood, with a note that says the name here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from safari.errors import ConfigError

FIELDS = {
    "local.batch_size": "local.batch",
    "local.learning_rate": "local.lr",
    "local.optimizer": "local.optimiser",
}
"""Fields by a name that they do not have, and the one that they have."""

RULES = {"fedavg": "drop"}
"""Rules likewise. An arm keeps the name that was given."""


class AliasWarning(UserWarning):
    """A config names something as another framework does."""


def field_of(key: str) -> str:
    """A field's dotted name, whichever of its names was given.

    >>> field_of("local.lr")
    'local.lr'
    """
    if key in FIELDS:
        warnings.warn(f"{key} is called {FIELDS[key]} here", AliasWarning, stacklevel=2)
    return FIELDS.get(key, key)


def renamed(table: Mapping[str, Any]) -> dict[str, Any]:
    """A config's tables with the names that fields and rules have here; ConfigError where both were given.

    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     renamed({"local": {"learning_rate": 0.1}, "arms": ["fedavg", "safari"]})
    {'local': {'lr': 0.1}, 'arms': [{'name': 'fedavg', 'rule': 'drop'}, 'safari']}
    """
    out = dict(table)
    for head, inner in table.items():
        if isinstance(inner, Mapping) and any(f"{head}.{key}" in FIELDS for key in inner):
            names = {key: field_of(f"{head}.{key}").removeprefix(f"{head}.") for key in inner}
            both = next((key for key, name in names.items() if key != name and name in inner), None)
            if both is not None:
                raise ConfigError(
                    f"{head}.{both} and {head}.{names[both]} are the same field; give one of them"
                )
            out[head] = {names[key]: value for key, value in inner.items()}
    if isinstance(table.get("arms"), list | tuple):
        out["arms"] = [_arm(item) for item in table["arms"]]
    return out


def _arm(item: Any) -> Any:
    if isinstance(item, str) and item in RULES:
        item = {"name": item, "rule": item}
    if isinstance(item, Mapping) and item.get("rule") in RULES:
        name = item["rule"]
        warnings.warn(f"arms: the rule {name} is called {RULES[name]} here", AliasWarning, stacklevel=2)
        return {"name": name, **item, "rule": RULES[name]}
    return item
