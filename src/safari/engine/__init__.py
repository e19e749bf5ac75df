"""Engines that compute the rounds; `reference` reads like Algorithm 1."""

from safari.engine.assembly import assemble
from safari.engine.experiment import (
    ENGINES,
    Watcher,
    as_config,
    changed,
    check,
    check_and_note,
    engine_of,
    finished,
    ready,
    resume,
    run,
    run_seed,
    side_by_side,
)
from safari.engine.parts import KINDS, Parts, Problems, check_names, load_data, parts_of, rule_of
from safari.engine.world import World

__all__ = [
    "ENGINES",
    "KINDS",
    "Parts",
    "Problems",
    "Watcher",
    "World",
    "as_config",
    "assemble",
    "changed",
    "check",
    "check_and_note",
    "check_names",
    "engine_of",
    "finished",
    "load_data",
    "parts_of",
    "ready",
    "resume",
    "rule_of",
    "run",
    "run_seed",
    "side_by_side",
]
