"""Following a file of JSON lines that somebody else is still writing."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# So much at once: a long file shows its beginning while the rest is being read.
CHUNK = 16 * 2**20
# More of them are counted, but not told one by one.
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


@dataclass
class Tail:
    """How far a file has been read. `generation` grows when the file was cut back or replaced.

    A last line without its end is left for later. A line that is no JSON object is skipped and noted.
    """

    path: Path
    generation: int = 0
    _offset: int = 0
    _line: int = 0
    _inode: int = 0

    def __post_init__(self) -> None:
        self.skipped = Skipped(self.path.name)

    def read(self) -> list[tuple[int, dict[str, Any]]]:
        """The whole lines that came since, with their numbers; after a cut, those from the beginning."""
        try:
            with self.path.open("rb") as handle:
                about = os.fstat(handle.fileno())
                if about.st_ino != self._inode or self._was_cut(handle, about.st_size):
                    self._begin_again(about.st_ino)
                handle.seek(self._offset)
                data = handle.read(CHUNK)
                # One line longer than a chunk: rather all of it than never any.
                while b"\n" not in data and (more := handle.read(CHUNK)):
                    data += more
        except OSError:
            if self._offset:
                self._begin_again(0)
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [found for raw in whole.splitlines() if (found := self._parse(raw)) is not None]

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

    def _was_cut(self, handle: Any, size: int) -> bool:
        """Shorter than before, or cut and grown again: then a line no longer ends where one did."""
        if not self._offset:
            return False
        handle.seek(self._offset - 1)
        return size < self._offset or handle.read(1) != b"\n"

    def _begin_again(self, inode: int) -> None:
        if self._offset:
            self.generation += 1
        self._offset = self._line = 0
        self._inode = inode
        self.skipped = Skipped(self.path.name)
