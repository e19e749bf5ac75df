"""What computes the rounds: `reference` reads like Algorithm 1."""

from safari.engine.experiment import ENGINES, Watcher, check, engine_of, ready, resume, run
from safari.engine.world import KINDS, World, assemble, load_data, rule_of

__all__ = [
    "ENGINES",
    "KINDS",
    "Watcher",
    "World",
    "assemble",
    "check",
    "engine_of",
    "load_data",
    "ready",
    "resume",
    "rule_of",
    "run",
]
