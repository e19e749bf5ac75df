"""The paper's claims, re-run: experiment files, the work they ask for, the numbers, a page."""

from safari.evidence.book import Book
from safari.evidence.plan import Case, Experiment, find, read, shipped
from safari.evidence.work import Audience, Ending, Unit, cores, execute, once, shared_out, units_of

__all__ = [
    "Audience",
    "Book",
    "Case",
    "Ending",
    "Experiment",
    "Unit",
    "cores",
    "execute",
    "find",
    "once",
    "read",
    "shared_out",
    "shipped",
    "units_of",
]
