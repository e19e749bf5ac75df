"""A run's folder.

RUN/config.toml                      complete: `safari run RUN/config.toml` does it all again
RUN/summary.json                     final numbers, every arm
RUN/report.html, RUN/figures/
RUN/trials/ARM/seed-N/rounds.jsonl   one line a round; bit-equal between two runs of one config
RUN/trials/ARM/seed-N/timings.jsonl  seconds, apart because they are never equal
RUN/trials/ARM/seed-N/similarity.jsonl  the similarity matrix in some rounds, where the rule keeps one
RUN/trials/ARM/seed-N/checkpoint.safetensors
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from safari.config import Config, parse
from safari.errors import ConfigError, RunError
from safari.runs.files import append_line, keep_lines, making, temporaries, write_atomically
from safari.toml import read_toml, to_toml

FORMAT = "safari-run-1"
_SEED = re.compile(r"seed-(0|[1-9][0-9]{0,19})")


@dataclass(frozen=True)
class Saved:
    """A checkpoint: the round it was made after, its tensors, and small facts as JSON."""

    round: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Trial:
    """One arm with one seed."""

    arm: str
    seed: int
    path: Path

    @property
    def rounds(self) -> Path:
        """The file of records."""
        return self.path / "rounds.jsonl"

    @property
    def timings(self) -> Path:
        """The file of seconds."""
        return self.path / "timings.jsonl"

    @property
    def similarity(self) -> Path:
        """The file of similarity matrices."""
        return self.path / "similarity.jsonl"

    @property
    def checkpoint(self) -> Path:
        """The file of the last checkpoint."""
        return self.path / "checkpoint.safetensors"

    def append(
        self,
        record: Mapping[str, Any],
        seconds: Mapping[str, float],
        similarity: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a round's line, and its similarity matrix where there is one."""
        if similarity is not None:
            append_line(self.similarity, json.dumps(similarity))
        append_line(self.timings, json.dumps({"round": record["round"], **seconds}))
        append_line(self.rounds, json.dumps(record, allow_nan=False))

    def save(self, saved: Saved) -> None:
        """Replace the checkpoint, after all records so far are on the disk."""
        for path in (self.rounds, self.timings, self.similarity):
            if path != self.similarity or path.exists():
                _sync(path)
        # One entry: safetensors writes several in any order, and equal runs should have equal files.
        about = {"format": FORMAT, "round": saved.round, "facts": saved.facts}
        # Copies, because safetensors refuses tensors that share memory, as a rule's state may.
        tensors = {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in saved.tensors.items()
        }
        write_atomically(self.checkpoint, save(tensors, {"safari": json.dumps(about)}))

    def load(self) -> Saved | None:
        """The last checkpoint, with the records cut back to it; None where there is none yet."""
        if not self.checkpoint.exists():
            keep_lines(self.rounds, 0)
            keep_lines(self.timings, 0)
            keep_lines(self.similarity, 0)
            return None
        saved = read_checkpoint(self.checkpoint)
        pictures = [line.get("round", 0) for line in read_lines(self.similarity)]
        keep_lines(self.similarity, sum(round <= saved.round for round in pictures))
        kept = min(keep_lines(self.rounds, saved.round), keep_lines(self.timings, saved.round))
        if kept < saved.round:
            raise RunError(
                f"{self.path}: the checkpoint is of round {saved.round}, the records end at {kept}"
            )
        return saved

    def done(self) -> int:
        """How many rounds are safe: those of the last checkpoint, without reading its tensors."""
        return checkpoint_round(self.checkpoint) if self.checkpoint.exists() else 0

    def records(self) -> list[dict[str, Any]]:
        """The records so far; a last line that is still being written is left out."""
        return list(read_lines(self.rounds))


@dataclass(frozen=True)
class RunFolder:
    """A run: a config, and a trial for each arm and seed."""

    path: Path
    config: Config

    @classmethod
    def create(cls, path: Path, config: Config) -> RunFolder:
        """A new run; RunError when the folder holds one already."""
        if (path / "config.toml").exists():
            raise RunError(
                f"{path} holds a run already: go on with 'safari resume {path}', or choose another --out"
            )
        # What a process leaves that is killed between two of the next steps.
        left = {path / ".lock", path / ".writer", *temporaries(path)} if path.is_dir() else set()
        if path.exists() and (not path.is_dir() or set(path.iterdir()) - left):
            raise RunError(f"{path} is not an empty folder; choose another --out")
        text = to_toml(config)
        with making(path):
            write_atomically(path / "config.toml", text.encode())
        return cls(path, config)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A run that exists."""
        if not (path / "config.toml").is_file():
            raise RunError(f"{path} is not a run's folder: it has no config.toml")
        try:
            return cls(path, parse(read_toml(path / "config.toml")))
        except ConfigError as error:
            raise ConfigError([f"{path / 'config.toml'}: {problem}" for problem in error.problems]) from error

    def trial(self, arm: str, seed: int) -> Trial:
        """The place of one arm and seed; made when it is not there."""
        with making(self.path / "trials" / arm / f"seed-{seed}") as path:
            return Trial(arm, seed, path)

    def trials(self) -> list[Trial]:
        """All trials that the config asks for and that have begun, by arm and then by seed."""
        wanted = seeds_of(self.config)
        found = [
            Trial(arm.name, seed, self.path / "trials" / arm.name / f"seed-{seed}")
            for arm in self.config.arms
            for seed in _seeds_in(self.path / "trials" / arm.name)
            if seed in wanted
        ]
        return [trial for trial in found if trial.rounds.exists()]

    def write(self, name: str, text: str) -> Path:
        """Put a text file into the folder, atomically."""
        write_atomically(self.path / name, text.encode())
        return self.path / name

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the folder for one writer; RunError for the second."""
        lock = FileLock(self.path / ".lock", timeout=0)
        owner = self.path / ".writer"
        try:
            lock.acquire()
        except Timeout as error:
            who = owner.read_text().strip() if owner.exists() else "unknown"
            raise RunError(f"{self.path} is being written by another process (pid {who})") from error
        except OSError as error:
            raise RunError(f"cannot lock {self.path}: {error.strerror or error}") from error
        try:
            for left_by_a_crash in temporaries(self.path):
                left_by_a_crash.unlink(missing_ok=True)
            write_atomically(owner, f"{os.getpid()}\n".encode())
            yield
        finally:
            owner.unlink(missing_ok=True)
            lock.release()


def seeds_of(config: Config) -> range:
    """The seeds that a config asks for."""
    return range(config.seed, config.seed + config.seeds)


def _seeds_in(folder: Path) -> list[int]:
    """The seeds that have a folder. A config may ask for more than anyone could look for one by one."""
    if not folder.is_dir():
        return []
    names = (_SEED.fullmatch(entry.name) for entry in os.scandir(folder))
    return sorted(int(name[1]) for name in names if name)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSON-lines file; RunError names the line that is not JSON."""
    if not path.exists():
        return
    with path.open("rb") as handle:
        for number, line in enumerate(handle, 1):
            if not line.endswith(b"\n"):
                return
            try:
                value = json.loads(line)
            except ValueError as error:
                raise RunError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(value, dict):
                raise RunError(f"{path}, line {number} is not a record")
            yield value


def read_checkpoint(path: Path) -> Saved:
    """A checkpoint file, checked; never unpickles."""
    try:
        with safe_open(path, framework="pt") as handle:
            about = json.loads((handle.metadata() or {}).get("safari", "{}"))
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        if about.get("format") != FORMAT:
            raise RunError(f"{path}: format must be {FORMAT}, got {about.get('format')!r}")
        return Saved(int(about["round"]), tensors, dict(about["facts"]))
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        raise RunError(f"{path} is not a readable checkpoint: {error}") from error


def checkpoint_round(path: Path) -> int:
    """The round that a checkpoint was made after."""
    try:
        with safe_open(path, framework="pt") as handle:
            return int(json.loads((handle.metadata() or {})["safari"])["round"])
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise RunError(f"{path} is not a readable checkpoint: {error}") from error


def model_size(path: Path) -> int | None:
    """How many numbers the model of a checkpoint has, without reading it; None where that cannot be said."""
    try:
        with safe_open(path, framework="np") as handle:
            (size,) = handle.get_slice("model").get_shape()
        return int(size)
    except (SafetensorError, OSError, ValueError, TypeError):
        return None


def _sync(path: Path) -> None:
    try:
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
