"""A run's folder.

RUN/config.toml                      complete: `safari run RUN/config.toml` does it all again
RUN/plugins.json, RUN/plugins/       digests and copies of the plug-in files that the run was made with
RUN/summary.json                     final numbers, every arm
RUN/failure.txt                      why a run on Flower ended early
RUN/report.html, RUN/figures/
RUN/trials/ARM/seed-N/rounds.jsonl   one line a round; bit-equal between two runs of one config
RUN/trials/ARM/seed-N/timings.jsonl  seconds and the time of day, apart because they are never equal
RUN/trials/ARM/seed-N/similarity.jsonl  the similarity matrix in some rounds, where the rule keeps one
RUN/trials/ARM/seed-N/checkpoint.safetensors  the newest checkpoint; older ones have their round in the name
RUN/trials/ARM/seed-N/best.safetensors        the model with the best score so far, where that is kept
RUN/trials/ARM/seed-N/cut-N/         what was cut off when the run went back to an earlier round
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from safari.config import Config, parse
from safari.errors import ConfigError, RunError
from safari.runs import files
from safari.runs.checkpoint import (
    BEST,
    NEWEST,
    About,
    Saved,
    older_name,
    read_about,
    read_checkpoint,
    round_in,
    to_chunks,
)
from safari.runs.files import making, temporaries
from safari.runs.metrics import RunMetrics, read_metrics
from safari.runs.record import TIME, RoundRecord, read_records
from safari.text import utc_now
from safari.toml import parse_toml, to_toml

# Why a run ended early.
FAILURE = "failure.txt"
_SEED = re.compile(r"seed-(0|[1-9]\d{0,18})")
# All that this package puts into a run's folder.
_OWN = frozenset(
    {
        f"{name}.json"
        for name in ("clients", "model", "data", "task", "environment", "plugins", "summary", "mlflow")
    }
    | {"config.toml", "report.html", "trials", "figures", "plugins", "tensorboard", FAILURE}
)
# What is derived from the records of a whole trial, by packages above this one.
_DERIVED = ("numbers.json",)


@dataclass(frozen=True)
class Trial:
    """One arm with one seed."""

    arm: str
    seed: int
    path: Path

    @property
    def root(self) -> Path:
        """The run's folder: below it, no link is followed."""
        return self.path.parents[2] if self.path.parts[-3:-1] == ("trials", self.arm) else self.path

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
        """The file of the newest checkpoint."""
        return self.path / NEWEST

    def append(
        self,
        record: Mapping[str, Any],
        seconds: Mapping[str, float],
        similarity: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a round's line, and its similarity matrix where there is one."""
        if similarity is not None:
            files.append_line(self.similarity, json.dumps(similarity), self.root)
        files.append_line(
            self.timings, json.dumps({"round": record["round"], TIME: utc_now(), **seconds}), self.root
        )
        files.append_line(self.rounds, json.dumps(dict(record), allow_nan=False), self.root)

    def save(self, saved: Saved, keep: int = 1) -> None:
        """Make a checkpoint the newest one, after all records so far are on the disk.

        Args:
            saved: the checkpoint.
            keep: how many to keep, this one included; the oldest go.
        """
        for path in (self.rounds, self.timings, self.similarity):
            if path != self.similarity or files.is_there(path, self.root):
                files.sync(path, self.root)
        if keep > 1:
            self._set_aside(saved.round)
        files.write_atomically(self.checkpoint, to_chunks(saved, self.seed), self.root)
        older = self._older()
        kept = [round for round in older if round < saved.round][::-1][: keep - 1]
        for round in older:
            if round not in kept:
                files.remove(older[round], self.root)

    @property
    def best(self) -> Path:
        """The file of the model with the best score."""
        return self.path / BEST

    def has_best(self) -> bool:
        """Is there a model with the best score?"""
        return files.is_there(self.best, self.root)

    def save_best(self, saved: Saved) -> None:
        """Keep a model as the one with the best score so far."""
        files.write_atomically(self.best, to_chunks(saved, self.seed), self.root)

    def read_best(self) -> Saved:
        """The model with the best score, checked; RunError where none is kept."""
        if not self.has_best():
            raise RunError(
                f"{self.path} keeps no best model: checkpoint.best is off, or nothing was tested yet"
            )
        return read_checkpoint(self.best, self.root, seed=self.seed)

    def load(self) -> Saved | None:
        """The newest checkpoint, with the records cut back to it; None where there is none yet."""
        if self._newest() is None:
            for path in (self.rounds, self.timings, self.similarity):
                files.keep_lines(path, 0, self.root)
            files.remove(self.best, self.root)
            return None
        saved = self.read_checkpoint()
        files.keep_lines(self.similarity, self._pictures_until(saved.round), self.root)
        kept = min(files.keep_lines(path, saved.round, self.root) for path in (self.rounds, self.timings))
        if kept < saved.round:
            raise RunError(
                f"{self.path}: the checkpoint is of round {saved.round}, the records end at {kept}"
            )
        return saved

    def read_checkpoint(self) -> Saved:
        """The newest checkpoint, checked; RunError also names older ones that could be gone back to."""
        try:
            return read_checkpoint(self._newest() or self.checkpoint, self.root, seed=self.seed)
        except RunError as error:
            raise RunError(f"{error}{self._others()}") from error

    def about(self) -> About:
        """Metadata of the newest checkpoint, without its tensors; RunError as in `read_checkpoint`."""
        try:
            return read_about(self._newest() or self.checkpoint, self.root)
        except RunError as error:
            raise RunError(f"{error}{self._others()}") from error

    def done(self) -> int:
        """Number of rounds that are safe: those of the newest checkpoint, without reading its tensors."""
        return 0 if self._newest() is None else self.about().round

    def records(self, clients: int | None = None, skipped: list[str] | None = None) -> list[RoundRecord]:
        """The records so far; a last line that is still being written is left out.

        Args:
            clients: how many clients there are, where that is known: others in a record are an error.
            skipped: where damaged lines are named. Without it, the first one raises a RunError.
        """
        metrics = read_metrics(self.root)
        return read_records(self.rounds, self.root, metrics, clients=clients, skipped=skipped)

    def checkpoints(self) -> list[int]:
        """The rounds that have a checkpoint, ascending."""
        return sorted({*self._older(), self._newest_round() or 0} - {0})

    def can_rewind(self, round: int) -> None:
        """RunError when the trial is beyond a round and has no good checkpoint of it."""
        if round < 0:
            raise RunError(f"the round to go back to must be at least 0, got {round}")
        if self._reached() <= round or round == 0:
            return
        older = self._older()
        if round == self._newest_round():
            self.read_checkpoint()
        elif round in older:
            found = read_checkpoint(older[round], self.root, seed=self.seed)
            if found.round != round:
                raise RunError(f"{older[round]} is of round {found.round}, not of round {round}")
        else:
            there = ", ".join(map(str, [0, *self.checkpoints()]))
            raise RunError(f"{self.path} has no checkpoint of round {round}; it has those of {there}")

    def rewind(self, round: int) -> Path | None:
        """Go back to the state after a round (0: to the start).

        What is later is moved into a folder of its own, `cut-N`, whose path is returned; None where nothing
        is. The trial is never without a checkpoint that its records reach: a kill leaves it as it was or as
        it is to be, and nothing is lost.
        """
        self.can_rewind(round)
        if self._reached() <= round:
            return None
        aside = self._keep_aside(round)
        older = self._older()
        for number in older:
            if number > round:
                files.remove(older[number], self.root)
        if round == 0:
            files.remove(self.checkpoint, self.root)
        elif round != self._newest_round():
            files.rename(older[round], self.checkpoint, self.root)
        for name in _DERIVED:
            files.remove(self.path / name, self.root)
        best = self._round_of(self.best) if self.has_best() else 0
        if best is None or best > round:
            files.remove(self.best, self.root)
        self.load()
        return aside

    def _keep_aside(self, round: int) -> Path:
        """Copies of all that a rewind takes away."""
        taken = (re.fullmatch(r"cut-(\d{1,9})", entry.name) for entry in self.path.iterdir())
        number = 1 + max((int(found[1]) for found in taken if found), default=0)
        with making(self.path / f"cut-{number}", self.root) as aside:
            for path, count in (
                (self.rounds, round),
                (self.timings, round),
                (self.similarity, self._pictures_until(round)),
            ):
                if rest := files.lines_after(path, count, self.root):
                    files.write_atomically(aside / path.name, rest, self.root)
            for name in _DERIVED:
                if files.is_there(self.path / name, self.root):
                    data = files.read_plain(self.path / name, self.root)
                    files.write_atomically(aside / name, data, self.root)
            older = self._older()
            if self.has_best():
                files.duplicate(self.best, aside / BEST, self.root)
            later = {number: path for number, path in older.items() if number > round}
            newest, reached = self._newest(), self._newest_round()
            if newest is not None and reached is None:
                files.duplicate(newest, aside / newest.name, self.root)
            elif newest is not None and reached is not None and reached > round:
                later[reached] = newest
            for number, path in later.items():
                files.duplicate(path, aside / older_name(number), self.root)
        return aside

    def _set_aside(self, round: int) -> None:
        """Give the newest checkpoint a name that stays when another becomes the newest."""
        if not files.is_there(self.checkpoint, self.root):
            return
        with suppress(RunError):
            before = self.about().round
            if before < round:
                files.duplicate(self.checkpoint, self.path / older_name(before), self.root)

    def _older(self) -> dict[int, Path]:
        """Older checkpoints by round, ascending."""
        if not self.path.is_dir():
            return {}
        found = {number: path for path in self.path.iterdir() if (number := round_in(path.name)) is not None}
        return dict(sorted(found.items()))

    def _newest(self) -> Path | None:
        """The newest checkpoint; None where there is none."""
        if files.is_there(self.checkpoint, self.root):
            return self.checkpoint
        # Somebody removed it, or renamed an older one on the way back to it.
        return next(reversed(self._older().values()), None)

    def _others(self) -> str:
        older = ", ".join(map(str, self._older()))
        return f" (there are older ones, of rounds {older}: see safari resume --from)" if older else ""

    def _reached(self) -> int:
        """The last round of which anything is there."""
        lines = sum(1 for _ in read_lines(self.rounds, self.root))
        newest = self._newest_round()
        # A checkpoint that cannot be read was made after whatever the user wants to go back to.
        return lines + 1 if newest is None else max(lines, newest)

    def _newest_round(self) -> int | None:
        """The round of the newest checkpoint: 0 where there is none, None where it cannot be read."""
        newest = self._newest()
        return 0 if newest is None else self._round_of(newest)

    def _round_of(self, checkpoint: Path) -> int | None:
        try:
            return read_about(checkpoint, self.root).round
        except RunError:
            return None

    def _pictures_until(self, round: int) -> int:
        numbers = (line.get("round") for line in read_lines(self.similarity, self.root))
        return sum(isinstance(number, int) and number <= round for number in numbers)


@dataclass(frozen=True)
class RunFolder:
    """A run: a config, and a trial for each arm and seed."""

    path: Path
    config: Config

    @classmethod
    def create(cls, path: Path, config: Config, *, overwrite: bool = False) -> RunFolder:
        """A new run; RunError when the folder holds one already.

        Args:
            path: its folder, new or empty.
            config: what it is to be.
            overwrite: remove the run that the folder holds, unless there is anything else in it.
        """
        if overwrite and files.is_there(path / "config.toml"):
            cls(path, config)._discard()
        if files.is_there(path / "config.toml"):
            raise RunError(f"{path} holds a run already: resume it, overwrite it, or choose another folder")
        # What a process leaves that is killed between two of the next steps.
        left = {path / ".lock", path / ".writer", *temporaries(path)} if path.is_dir() else set()
        if path.exists() and (not path.is_dir() or set(path.iterdir()) - left):
            raise RunError(f"{path} is not an empty folder; choose another one")
        text = to_toml(config)
        with making(path):
            files.write_atomically(path / "config.toml", text.encode())
        return cls(path, config)

    def _discard(self) -> None:
        """Remove a run's own files. `config.toml` goes last: a kill leaves what can be discarded again."""
        with self.writing():
            there = sorted(self.path.iterdir(), key=lambda entry: entry.name == "config.toml")
            left = {*temporaries(self.path), self.path / ".lock", self.path / ".writer"}
            foreign = [entry.name for entry in there if entry.name not in _OWN and entry not in left]
            if foreign:
                raise RunError(
                    f"{self.path} holds more than a run: {', '.join(foreign[:5])}; nothing was removed"
                )
            for entry in (entry for entry in there if entry not in left):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A run that exists. Nothing that it names is imported."""
        file = path / "config.toml"
        try:
            data = files.read_plain(file)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RunError(f"{path} is not a run's folder: it has no config.toml") from error
        try:
            return cls(path, parse(parse_toml(data, file)))
        except ConfigError as error:
            prefix = f"{file}: "
            raise ConfigError(
                [line if line.startswith(str(file)) else prefix + line for line in error.problems]
            ) from error

    def trial(self, arm: str, seed: int) -> Trial:
        """The place of one arm and seed; made when it is not there."""
        with making(self.path / "trials" / arm / f"seed-{seed}", self.path) as path:
            return Trial(arm, seed, path)

    def trials(self) -> list[Trial]:
        """All trials that the config asks for and that have begun, by arm and then by seed."""
        asked = seeds_of(self.config)
        return [
            trial
            for arm in self.config.arms
            for seed in _seeds_in(self.path / "trials" / arm.name)
            if seed in asked
            for trial in [Trial(arm.name, seed, self.path / "trials" / arm.name / f"seed-{seed}")]
            if files.is_there(trial.rounds, self.path)
        ]

    def rewind(self, round: int) -> list[Path]:
        """Go back to the state after a round, in all trials; returns where what is later is kept.

        The caller holds the folder (`writing`). RunError, with nothing changed, when a trial that is beyond
        the round has no checkpoint of it, or when no trial ever gets there.
        """
        trials = self.trials()
        # A federation may have gone further than the config that it began with.
        last = max([self.config.rounds, *(done for trial in trials for done in trial.checkpoints())])
        if round > last:
            raise RunError(f"{self.path} has {last} rounds: it cannot go back to round {round}")
        for trial in trials:
            trial.can_rewind(round)
        # What it says is of rounds that are about to go.
        files.remove(self.path / "summary.json")
        return [aside for trial in trials if (aside := trial.rewind(round)) is not None]

    @property
    def metrics(self) -> RunMetrics:
        """The metrics of the run's task; RunError when its `task.json` cannot be read."""
        return read_metrics(self.path)

    @property
    def is_federation(self) -> bool:
        """Was it made by a Flower federation? Then only a federation can go on with it."""
        return "flwr" in self.read("environment.json")

    def read(self, name: str) -> dict[str, Any]:
        """Read a JSON object from a file in the folder; an empty one where there is none."""
        return files.read_object(self.path / name, self.path)

    def write(self, name: str, text: str) -> Path:
        """Put a text file into the folder, atomically."""
        files.write_atomically(self.path / name, text.encode(), self.path)
        return self.path / name

    def writer(self) -> int | None:
        """The number of the process that says that it holds the folder; None where none does. It may be gone."""
        try:
            text = files.read_plain(self.path / ".writer", limit=32).decode("ascii", "replace").strip()
        except (OSError, RunError):
            return None
        return int(text) if text.isdigit() else None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the folder for one writer; RunError for the second."""
        name = self.path / ".lock"
        if files.is_there(name):
            # The lock's library would follow a link and empty what is behind it.
            files.open_plain(name).close()
        lock = FileLock(name, timeout=0)
        owner = self.path / ".writer"
        try:
            lock.acquire()
        except Timeout as error:
            pid = self.writer() or "unknown"
            raise RunError(f"{self.path} is being written by another process (pid {pid})") from error
        except OSError as error:
            raise RunError(f"cannot lock {self.path}: {error.strerror or error}") from error
        try:
            for left_by_a_crash in temporaries(self.path, abandoned=True):
                files.remove(left_by_a_crash, self.path)
            files.write_atomically(owner, f"{os.getpid()}\n".encode())
            yield
        finally:
            with suppress(OSError):
                owner.unlink()
            lock.release()


def seeds_of(config: Config) -> range:
    """The seeds that a config asks for."""
    return range(config.seed, config.seed + config.seeds)


def read_lines(path: Path, root: Path | None = None) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSON-lines file; RunError names the line that is not JSON."""
    if not files.is_there(path, root):
        return
    with files.open_plain(path, root) as handle:
        number = 0
        while line := handle.readline(files.LONGEST_LINE):
            number += 1
            if not line.endswith(b"\n"):
                if len(line) == files.LONGEST_LINE:
                    raise RunError(f"{path}, line {number} is longer than {files.LONGEST_LINE:,} bytes")
                return
            try:
                value = json.loads(line, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                words = "it is nested too deeply" if isinstance(error, RecursionError) else error
                raise RunError(f"{path}, line {number} is not JSON: {words}") from error
            if not isinstance(value, dict):
                raise RunError(f"{path}, line {number} is not a record")
            yield value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number that JSON has")


def _seeds_in(folder: Path) -> Sequence[int]:
    """The seeds of the trials in an arm's folder, ascending. A config may ask for any number of them."""
    if not folder.is_dir():
        return []
    found = (_SEED.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)
