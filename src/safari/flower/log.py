"""Flower's log, with the time of day (UTC) before each of our lines."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from safari.text import utc_now


class _Timed(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        # Flower's own lines have no time: a line of ours says when it was for those around it, too.
        return f"{utc_now()} {msg}" if msg else msg, kwargs


log = _Timed(logging.getLogger("flwr"), {})
