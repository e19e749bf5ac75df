"""The page to watch runs on: served while they go on, or frozen into one file."""

from safari.view.page import write_report

__all__ = ["write_report"]
