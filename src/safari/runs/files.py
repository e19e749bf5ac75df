"""Writing so that nothing is ever half there: a temporary name, then a rename; whole lines or none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from safari.errors import RunError


def write_atomically(path: Path, data: bytes) -> None:
    """Put `data` at `path`: afterwards the file is either the old one or the new one, whole.

    RunError when the disk is full or the folder cannot be written; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _cannot_write(path, error) from error
        raise


def temporaries(folder: Path) -> list[Path]:
    """What `write_atomically` left anywhere in a folder when its process was killed."""
    return list(folder.rglob(".*.tmp"))


def append_line(path: Path, line: str) -> None:
    """Append one line, or nothing at all: after a failed write the file has its old length."""
    length = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as handle:
            handle.write(line.encode() + b"\n")
    except OSError as error:
        truncate(path, length)
        raise _cannot_write(path, error) from error


def truncate(path: Path, length: int) -> None:
    """Cut a file back to `length` bytes."""
    with contextlib.suppress(OSError):
        os.truncate(path, length)


def keep_lines(path: Path, count: int) -> int:
    """Cut a file back to its first `count` whole lines; returns how many there are then."""
    if not path.exists():
        return 0
    kept = length = 0
    with path.open("rb") as handle:
        for line in handle:
            if kept == count or not line.endswith(b"\n"):
                break
            kept += 1
            length += len(line)
    truncate(path, length)
    return kept


@contextlib.contextmanager
def making(path: Path) -> Iterator[Path]:
    """Make the folder, and say which one when that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(path, error) from error
    yield path


def _cannot_write(path: Path, error: OSError) -> RunError:
    return RunError(f"cannot write {path}: {error.strerror or error}; what was there before is untouched")
