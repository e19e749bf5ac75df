"""What computes the rounds: `reference` reads like Algorithm 1."""

from safari.engine.experiment import (
    ENGINES,
    Watcher,
    as_config,
    check,
    engine_of,
    finished,
    ready,
    resume,
    run,
    run_seed,
    side_by_side,
)
from safari.engine.world import KINDS, Problems, World, assemble, check_names, load_data, rule_of

__all__ = [
    "ENGINES",
    "KINDS",
    "Problems",
    "Watcher",
    "World",
    "as_config",
    "assemble",
    "check",
    "check_names",
    "engine_of",
    "finished",
    "load_data",
    "ready",
    "resume",
    "rule_of",
    "run",
    "run_seed",
    "side_by_side",
]
