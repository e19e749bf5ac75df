"""The page of a reproduction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safari.evidence.book import Book
from safari.evidence.plan import Experiment


def write_page(experiments: Sequence[Experiment], book: Book, out: Path) -> Path:
    """placeholder"""
    return out / "report.html"
