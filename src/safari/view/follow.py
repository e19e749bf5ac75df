"""Following a file of JSON lines that another process is still writing."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from safari.errors import RunError
from safari.runs.files import LONGEST_LINE, open_plain

# Bytes read at once: a long file shows its beginning while the rest is being read.
CHUNK = 16 * 2**20
# Further problems are counted, but not listed one by one.
MOST_PROBLEMS = 20


@dataclass
class Skipped:
    """Lines of a file that could not be used."""

    name: str
    count: int = 0
    problems: list[str] = field(default_factory=list)

    def note(self, line: int, problem: str) -> None:
        """Remember that a line was skipped, and why."""
        self.count += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(f"{self.name}, line {line} was skipped: {problem}")

    def note_file(self, problem: str) -> None:
        """Remember that the file cannot be read at all, once for each problem."""
        if problem not in self.problems:
            self.count += 1
            self.problems.append(problem)


def without_folder(error: Exception, root: Path) -> str:
    """Text of an error, with paths relative to the run's folder: a page may be passed on."""
    return str(error).replace(f"{root}{os.sep}", "")


@dataclass
class LineFollower:
    """Reader of the new lines of a growing file. `generation` grows when the file was cut back or replaced.

    An incomplete last line is left for the next call. A line that is not a JSON object is skipped and
    listed in `skipped`, with the reason.

    path: the file. root: the run's folder, below which no link is followed; the file's own by default.
    """

    path: Path
    root: Path | None = None
    generation: int = 0
    _offset: int = 0
    _line: int = 0
    _inode: int = 0
    _inside_long_line: bool = False

    def __post_init__(self) -> None:
        self.skipped = Skipped(self.path.name)

    def read(self) -> list[tuple[int, dict[str, Any]]]:
        """The whole lines that are new, with their numbers; after a cut, those from the beginning."""
        try:
            with open_plain(self.path, self.root) as handle:
                about = os.fstat(handle.fileno())
                if about.st_ino != self._inode or self._was_cut(handle, about.st_size):
                    self._restart(about.st_ino)
                handle.seek(self._offset)
                data = self._next_bytes(handle)
        except (OSError, RunError) as error:
            if self._offset:
                self._restart(0)
            if isinstance(error, RunError):
                self.skipped.note_file(without_folder(error, self.root or self.path.parent))
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [found for raw in whole.splitlines() if (found := self._parse(raw)) is not None]

    def _next_bytes(self, handle: BinaryIO) -> bytes:
        """Some bytes from here on: at least one whole line where there is one, nothing of an overlong one."""
        data = handle.read(CHUNK)
        if self._inside_long_line:
            end = data.find(b"\n") + 1
            self._offset += end or len(data)
            self._inside_long_line = not end
            if not end:
                return b""
            data = data[end:]
        parts = [data]
        length = len(data)
        while b"\n" not in parts[-1] and length < LONGEST_LINE and (more := handle.read(CHUNK)):
            parts.append(more)
            length += len(more)
        if length >= LONGEST_LINE and b"\n" not in parts[-1]:
            self._line += 1
            self.skipped.note(self._line, f"longer than {LONGEST_LINE} bytes")
            self._offset += length
            self._inside_long_line = True
            return b""
        return b"".join(parts)

    def _parse(self, raw: bytes) -> tuple[int, dict[str, Any]] | None:
        self._line += 1
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as error:
            self.skipped.note(self._line, f"not JSON ({type(error).__name__})")
            return None
        if not isinstance(value, dict):
            self.skipped.note(self._line, f"not a record but {type(value).__name__}")
            return None
        return self._line, value

    def _was_cut(self, handle: BinaryIO, size: int) -> bool:
        """Whether the file is shorter than before, or was cut and grew again, so that no line ends where one did."""
        if not self._offset:
            return False
        handle.seek(self._offset - 1)
        return size < self._offset or (not self._inside_long_line and handle.read(1) != b"\n")

    def _restart(self, inode: int) -> None:
        if self._offset:
            self.generation += 1
        self._offset = self._line = 0
        self._inode, self._inside_long_line = inode, False
        self.skipped = Skipped(self.path.name)
