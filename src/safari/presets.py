"""Settings that belong together, by name: `safari run --preset NAME` puts them under your own `--set`."""

from __future__ import annotations

from safari.errors import ConfigError, one_of

PRESETS: dict[str, tuple[str, ...]] = {
    # The defaults of every field, and the recipe beside the paper's arms.
    "demo": (
        'arms = ["perfect", "drop", "safari", "safari+", {name = "recipe", rule = "safari+", set = {'
        'pruning = {pruner = "rand", scope = "erk"}, '
        'local = {optimiser = "sgd", lr = 0.015, schedule = "cosine", final = 0.05}, '
        'client = {name = "mime", momentum = 0.8, second = 0.999, strength = 1.0}}}]',
    ),
    # The setting of the paper's experiments, apart from its data and model.
    "paper": (
        'arms = ["perfect", "drop", "safari"]',
        'pruning.pruner = "synflow"',
        "pruning.sparsity = 0.8",
        "local.steps = 5",
        "local.batch = 64",
        'local.optimiser = "adam"',
        "local.lr = 0.001",
    ),
    # The recipe: what to take for the best model over bad links. Chosen on validation data split off CIFAR-10's
    # training set (experiments/tuning*.toml); docs/evidence.md has what it is worth.
    "best": (
        'arms = [{name = "recipe", rule = "safari+"}]',
        'pruning.pruner = "rand"',
        'pruning.scope = "erk"',
        'local.optimiser = "sgd"',
        "local.lr = 0.015",
        'local.schedule = "cosine"',
        "local.final = 0.05",
        'client.name = "mime"',
        "client.momentum = 0.8",
        "client.second = 0.999",
        "client.strength = 1.0",
        "aggregation.average = 0.9",
        'wire.values = "step"',
        "wire.ratio = 80.0",
    ),
}


def preset(name: str) -> tuple[str, ...]:
    """The settings of a preset, as `--set` takes them.

    >>> preset("paper")[1]
    'pruning.pruner = "synflow"'
    """
    if name not in PRESETS:
        raise ConfigError(one_of("preset", name, PRESETS))
    return PRESETS[name]
