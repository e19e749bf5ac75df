"""Make text from others fit for a terminal, a log and a record."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> str:
    """The time of day to the second, as `2026-01-31T23:59:59Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def visible(text: str, longest: int = 300) -> str:
    r"""The text with every character that a terminal might act on written out, and bounded in length.

    >>> visible("ok \x1b[2J\u202e")
    'ok \\x1b[2J\\u202e'
    >>> visible("abcdefgh", 6)
    'abc...'
    """
    short = text if len(text) <= longest else text[: longest - 3] + "..."
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)
    return shown if len(shown) <= longest else shown[: longest - 3] + "..."
