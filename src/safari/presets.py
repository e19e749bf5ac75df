"""Settings that belong together, by name: `safari run --preset NAME` puts them under your own `--set`; and the recipe,
which is an arm as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from safari.errors import ConfigError, one_of

Settings = list[tuple[str, Any]]
Tables = Mapping[str, Any]

RECIPE = "recipe"
# Success of the demo's links: clients of the second group of labels are heard from once in ten rounds, save one.
UNEVEN = [1, 0.9, 0.9, 0.9, 0.9, 1, 0.1, 0.1, 0.1, 0.1]
# What the recipe does about the missing.
RECIPE_RULE = "safari+"
# Where at most this share of the clients is asked in a round, what an upload left out is old when it is sent.
_FEW = 0.25


def recipe(config: Tables) -> dict[str, dict[str, Any]]:
    """Masks and clients of the recipe for a config's task, as the tables in which its arm differs from others.

    Chosen on validation data split off CIFAR-10's training set. The loss is calibrated by label counts where
    labels are classes.

    >>> recipe({"task": {"name": "regression"}})["client"]
    {'name': 'mime', 'momentum': 0.8, 'second': 0.999}
    """
    task = config.get("task", {})
    classes = isinstance(task, Mapping) and task.get("name", "classification") == "classification"
    return {
        "pruning": {"pruner": "rand", "scope": "erk"},
        "local": {"optimiser": "sgd", "lr": 0.015, "schedule": "cosine", "final": 0.05},
        "client": {"name": "mime", "momentum": 0.8, "second": 0.999} | ({"strength": 1.0} if classes else {}),
    }


def _demo(_: Tables) -> Settings:
    """The defaults of every field, the recipe next to the paper's arms, and half of the labels behind bad links."""
    return [("arms", ["perfect", "drop", "safari", "safari+", RECIPE]), ("uplink.p", UNEVEN)]


def _paper(_: Tables) -> Settings:
    """The setting of the paper's experiments, apart from its data and model."""
    return [
        ("arms", ["perfect", "drop", "safari"]),
        ("uplink.name", "bernoulli"),
        ("uplink.p", [1, 0.3, 0.3, 0.3, 0.3]),
        ("pruning.pruner", "synflow"),
        ("pruning.sparsity", 0.8),
        ("local.steps", 5),
        ("local.batch", 64),
        ("local.optimiser", "adam"),
        ("local.lr", 0.001),
    ]


def _best(config: Tables) -> Settings:
    """The recipe for all arms, coarse uploads, and a running average: what to take for the best model over bad links.

    docs/found.md has what it is worth. Where few of many clients are asked, uploads are finer and error feedback is
    off, because it does harm there.
    """
    clients, cohort = config.get("clients", 10), config.get("cohort", 0)
    numbers = isinstance(clients, int) and isinstance(cohort, int)
    few = numbers and 0 < cohort <= _FEW * clients
    return [
        ("arms", [{"name": RECIPE, "rule": RECIPE_RULE}]),
        *((f"{head}.{key}", value) for head, table in recipe(config).items() for key, value in table.items()),
        ("aggregation.average", 0.9),
        ("wire.values", "step"),
        ("wire.ratio", 20.0 if few else 80.0),
        *([("wire.feedback", False)] if few else []),
    ]


PRESETS: dict[str, Callable[[Tables], Settings]] = {"demo": _demo, "paper": _paper, "best": _best}


def preset(name: str, config: Tables | None = None) -> Settings:
    """The settings of a preset for a config, given as tables: keys and values, as `override` takes them.

    >>> preset("paper")[3]
    ('pruning.pruner', 'synflow')
    >>> preset("best", {"clients": 100, "cohort": 10})[-1]
    ('wire.feedback', False)
    """
    if name not in PRESETS:
        raise ConfigError(one_of("preset", name, PRESETS))
    return PRESETS[name](config or {})
