"""Flower's log, with the time of day (UTC) before each of our lines."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any


def utc_now() -> str:
    """The time of day to the second, as `2026-01-31T23:59:59Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class _Timed(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        # Flower's own lines have no time: a line of ours says when it was for those around it, too.
        return f"{utc_now()} {msg}" if msg else msg, kwargs


log = _Timed(logging.getLogger("flwr"), {})
