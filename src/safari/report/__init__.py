"""The results of a run: the table and the figures; and trackers that follow it."""

from safari.report.gallery import write_figures
from safari.report.loaded import Run, load
from safari.report.table import Row, cells, explain, rows_of, to_markdown, to_rich, to_text, warnings_of
from safari.report.track import MLflow, TensorBoard, watchers_for

__all__ = [
    "MLflow",
    "Row",
    "Run",
    "TensorBoard",
    "cells",
    "explain",
    "load",
    "rows_of",
    "to_markdown",
    "to_rich",
    "to_text",
    "warnings_of",
    "watchers_for",
    "write_figures",
]
