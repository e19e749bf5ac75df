"""The paper's claims, run again: experiment files, the work they ask for, the numbers, a page."""

from safari.evidence.plan import Case, Experiment, find, read, shipped
from safari.evidence.results import Results
from safari.evidence.schedules import partial_tests
from safari.evidence.work import (
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
    "Experiment",
    "Observer",
    "Outcome",
    "Results",
    "Unit",
    "cores",
    "execute",
    "find",
    "partial_tests",
    "read",
    "shipped",
    "split_for",
    "trials_of",
    "units_of",
    "without_duplicates",
]
