"""What a run came to: the table, the figures, one page; and trackers that follow it."""

from safari.report.page import write_figures, write_report
from safari.report.table import Row, cells, explain, rows_of, to_markdown, to_rich, to_text
from safari.report.track import MLflow, TensorBoard, watchers_for

__all__ = [
    "MLflow",
    "Row",
    "TensorBoard",
    "cells",
    "explain",
    "rows_of",
    "to_markdown",
    "to_rich",
    "to_text",
    "watchers_for",
    "write_figures",
    "write_report",
]
