"""Snapshots of a trial's similarity matrix: located by round, read on request."""

from __future__ import annotations

import json
import re
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from safari.errors import RunError
from safari.runs import Trial
from safari.runs.files import LONGEST_LINE, open_plain
from safari.runs.similarity import MOST_CLIENTS, from_line, matrix_in_checkpoint
from safari.view.follow import Skipped, without_folder

# What the page can draw and a request can carry.
MOST_DRAWN = 1000
_ROUND = re.compile(rb'^\{"round": (\d{1,9}), "clients": (\d{1,6}), "pairs": "')


class SimilaritySnapshots:
    """Positions of a trial's snapshots in their file. Without a file, the last checkpoint is the only snapshot.

    trial: the trial they belong to. clients: how many rows and columns a matrix of the checkpoint must have.
    """

    def __init__(self, trial: Trial, clients: int):
        self._trial, self._clients = trial, clients
        self.skipped = Skipped(trial.similarity.name)
        self._places: dict[int, tuple[int, int]] = {}
        self._offset = 0
        self._checkpoint: tuple[int, int] | None = None
        self._from_checkpoint: int | None = None
        self._unreadable = ""
        self.generation = 0

    @property
    def rounds(self) -> list[int]:
        """The rounds with a snapshot, ascending."""
        if not self._places and self._from_checkpoint is not None:
            return [self._from_checkpoint]
        return list(self._places)

    @property
    def note(self) -> str:
        """Reason why there is no snapshot, or only that of the last checkpoint; empty otherwise."""
        if self._places:
            return ""
        if self._from_checkpoint is not None:
            return "Only the last checkpoint is known: this run kept no snapshots of earlier rounds."
        return self._unreadable or "This rule keeps no similarity matrix, or none was written yet."

    def poll(self) -> None:
        """Look for more; a folder that goes away meanwhile has no more."""
        try:
            self._poll()
        except RunError as error:
            self.skipped.note_file(without_folder(error, self._trial.root))
        except OSError:
            pass

    def _poll(self) -> None:
        path = self._trial.similarity
        size = path.stat().st_size if path.exists() else 0
        if size < self._offset:
            self.generation += 1
            self._places.clear()
            self._offset = 0
            self.skipped = Skipped(path.name)
        if size > self._offset:
            self._scan()
        if not self._places:
            self._look_at_checkpoint()

    def read(self, round: int) -> NDArray[np.float32]:
        """The matrix after a round; RunError where there is none."""
        if round in self._places:
            offset, length = self._places[round]
            try:
                with self._open() as handle:
                    handle.seek(offset)
                    return from_line(json.loads(handle.read(length)))
            except (OSError, ValueError, RecursionError) as error:
                raise RunError(f"similarity.jsonl has changed: {error}") from error
        if round == self._from_checkpoint and not self._places:
            matrix = self._matrix_in_checkpoint()
            if matrix is not None:
                return matrix
        raise RunError(f"there is no similarity matrix of round {round}")

    def _open(self) -> BinaryIO:
        return open_plain(self._trial.similarity, self._trial.root)

    def _matrix_in_checkpoint(self) -> NDArray[np.float32] | None:
        return matrix_in_checkpoint(self._trial.checkpoint, self._clients, self._trial.root)

    def _scan(self) -> None:
        with self._open() as handle:
            handle.seek(self._offset)
            while (raw := handle.readline(LONGEST_LINE)).endswith(b"\n"):
                self._note(raw)
                self._offset += len(raw)

    def _note(self, raw: bytes) -> None:
        # Only the beginning: decoding hundreds of matrices before they are asked for would take seconds.
        head = _ROUND.match(raw)
        round = int(head[1]) if head else 0
        last = next(reversed(self._places), 0)
        if head is None or round <= last or not 2 <= int(head[2]) <= MOST_CLIENTS:
            self.skipped.note(len(self._places) + self.skipped.count + 1, "not a similarity matrix")
        else:
            self._places[round] = self._offset, len(raw)

    def _look_at_checkpoint(self) -> None:
        try:
            about = self._trial.checkpoint.stat()
        except OSError:
            return
        seen = about.st_mtime_ns, about.st_size
        if seen == self._checkpoint:
            return
        self._checkpoint, self._unreadable = seen, ""
        found = None
        try:
            if self._clients <= MOST_DRAWN and self._matrix_in_checkpoint() is not None:
                found = self._trial.about().round
        except RunError as error:
            words = without_folder(error, self._trial.root)
            self._unreadable = f"The checkpoint's similarity matrix is left out: {words}."
        if found != self._from_checkpoint:
            self.generation += self._from_checkpoint is not None
            self._from_checkpoint = found
