"""The version, on its own so that nothing has to be imported to read it."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

__version__ = "0.1.0"

# What shows, ships, compares or only offers what the others compute: its code changes no number of a trial.
_WITHOUT_NUMBERS = ("api.py", "cli", "exports.py", "flower", "lab", "net", "report", "sweep", "view")


@cache
def code_version() -> str:
    """A short digest of the source files that a trial's numbers follow from: the same code, the same digest.

    A release number stands for many states of the code, and an installed package has no history to ask.
    Comments count, too: who changed only those has to say so, and nobody has to judge what is only a
    comment.
    """
    return digest_of(Path(__file__).parent)


def digest_of(package: Path) -> str:
    """12 hexadecimal digits over the names and texts of a package's Python files, apart from some rooms."""
    found = hashlib.sha256()
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    for name in sorted(files):
        if name.split("/")[0] not in _WITHOUT_NUMBERS:
            # Line ends are no part of the code: a checkout may have changed them.
            text = files[name].read_bytes().replace(b"\r\n", b"\n")
            found.update(b"%d %s %d " % (len(name), name.encode(), len(text)) + text)
    return found.hexdigest()[:12]
