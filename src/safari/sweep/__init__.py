"""Sweeps: a config in many variants, worked off by several processes, stopped and gone on with, compared by tests."""

from safari.sweep.comparison import Comparison, Difference, compare
from safari.sweep.plan import Case, Sweep, SweepFile, read, read_as
from safari.sweep.results import Results, load_sweep, trials_by_version
from safari.sweep.schedules import partial_tests
from safari.sweep.work import (
    Observer,
    Outcome,
    Unit,
    cores,
    execute,
    split_for,
    trials_of,
    units_of,
    without_duplicates,
)

__all__ = [
    "Case",
    "Comparison",
    "Difference",
    "Observer",
    "Outcome",
    "Results",
    "Sweep",
    "SweepFile",
    "Unit",
    "compare",
    "cores",
    "execute",
    "load_sweep",
    "partial_tests",
    "read",
    "read_as",
    "split_for",
    "trials_by_version",
    "trials_of",
    "units_of",
    "without_duplicates",
]
