"""Text from the other side of a network, made fit for logs and records."""

from __future__ import annotations

import traceback

from safari.text import visible

# A traceback's last line is near its end: no need to look at megabytes of it.
_LOOKED_AT = 10_000


def last_line(text: str) -> str:
    r"""Last line of a traceback, which names the error.

    >>> last_line("Traceback\n  File ...\nValueError: \x07no\n\n")
    'ValueError: \\x07no'
    """
    lines = text[-_LOOKED_AT:].splitlines()
    return visible(next((line.strip() for line in reversed(lines) if line.strip()), ""))


def visible_traceback() -> str:
    """The traceback of the exception that is being handled: its words may be a client's."""
    lines = traceback.format_exc()[-_LOOKED_AT:].splitlines()
    return "\n".join(visible(line, _LOOKED_AT) for line in lines)
