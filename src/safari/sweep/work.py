"""The rounds that are still to be done, distributed over processes.

Each process takes one seed of a case at a time or, where processes would be idle otherwise, one arm of it.
A case is an ordinary run folder. Its trials are independent, so a finished one is never run twice, and one
that was interrupted continues from its checkpoint: `safari resume` would do the same, one folder at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

import torch

from safari.config import Arm
from safari.data import Data
from safari.engine import load_data, run_seed
from safari.errors import RunError, SafariError
from safari.runs import RoundRecord, RunFolder, RunMetrics, Trial, seeds_of, summarise
from safari.runs.files import is_there, write_atomically
from safari.runs.metrics import read_metrics
from safari.sweep.numbers import read_numbers, write_numbers
from safari.sweep.plan import Case, digest
from safari.sweep.results import Results, identity
from safari.toml import to_toml
from safari.trust import Session, inherited, session

# Units are split where the work would take longer than this multiple of the shortest time possible.
_UNEVEN = 1.2
# Seconds between two progress reports of a process.
_REPORT_EVERY = 0.25
# Seconds that a process may take to finish its current round and to save when everything is to stop.
_STOP_TIMEOUT = 60.0


@dataclass(frozen=True)
class Unit:
    """One seed of a case: the arms that are not finished, and how many rounds of each are done.

    `part`: `done` holds one arm of several; the others are units of their own. `numbers`: write those of a finished
    trial next to its records, where results are gathered from.
    """

    case: Case
    folder: Path
    seed: int
    done: Mapping[str, int]
    # What a round counts for in the estimate of the time left.
    weight: float
    part: bool = False
    numbers: bool = True

    @property
    def rounds(self) -> int:
        """Number of rounds that are to be done, over the arms."""
        return sum(self.case.config.rounds - done for done in self.done.values())

    @property
    def work(self) -> float:
        """Rounds that are to be done, each counted with its weight in the estimate."""
        return self.weight * self.rounds

    @property
    def label(self) -> str:
        """Description of the unit for messages."""
        arm = f" {', '.join(self.done)}" if self.part else ""
        case = f"{self.case.sweep}/{self.case.name}" if self.case.name else self.case.sweep
        return f"{case} seed {self.seed}{arm}"


class Observer(Protocol):
    """Receiver of the progress of the processes."""

    def begin(self, worker: int, unit: Unit) -> None:
        """A process has begun a unit."""

    def at(self, worker: int, unit: Unit, rounds: int, text: str) -> None:
        """The process has done `rounds` of the unit's rounds; `text` says where it is."""

    def end(self, worker: int, unit: Unit, problem: str) -> None:
        """The process has finished the unit, or failed with a problem."""


@dataclass(frozen=True)
class Outcome:
    """Units that failed, each with the reason, and whether the time was up before all were done."""

    failed: Mapping[str, str]
    stopped: bool


def open_folder(case: Case, out: Path) -> RunFolder:
    """The run folder of a case: a new one, or the existing one with the arms and seeds now asked for."""
    path = out / case.sweep / case.folder
    if not (path / "config.toml").exists():
        return RunFolder.create(path, case.config)
    there = RunFolder.open(path).config
    if digest(there) != digest(case.config):
        raise RunError(f"{path} holds another setting than its name says; move it away")
    if there != case.config:
        write_atomically(path / "config.toml", to_toml(case.config).encode())
    return RunFolder(path, case.config)


def trials_of(case: Case, out: Path) -> Iterator[Trial]:
    """The trials that a case itself runs, begun or not."""
    for arm in case.config.arms:
        if case.source(arm) is case:
            for seed in seeds_of(case.config):
                yield Trial(arm.name, seed, _trials(case, out, arm) / f"seed-{seed}")


def _trials(case: Case, out: Path, arm: Arm) -> Path:
    """The folder of an arm's trials."""
    return out / case.sweep / case.folder / "trials" / arm.name


def units_of(
    case: Case, out: Path, results: Results, weight: float, names: Collection[str] | None = None
) -> list[Unit]:
    """The seeds of a case that are not finished: neither in the results nor in the folder.

    `names`: the arms to look at; all by default.
    """
    pending: dict[int, dict[str, int]] = {}
    for arm in case.config.arms:
        if case.source(arm) is case and (names is None or arm.name in names):
            for seed, done in _unfinished(case, arm, out, results):
                pending.setdefault(seed, {})[arm.name] = done
    path = out / case.sweep / case.folder
    return [Unit(case, path, seed, pending[seed], weight) for seed in sorted(pending)]


def _unfinished(case: Case, arm: Arm, out: Path, results: Results) -> Iterator[tuple[int, int]]:
    """The seeds of an arm that are not finished, each with the rounds that are done."""
    folder, finished = _trials(case, out, arm), results.arm(case, arm)
    seeds = (seed for seed in seeds_of(case.config) if seed not in finished)
    if not is_there(folder):
        # Looking for 100,000 seeds one by one takes seconds.
        yield from ((seed, 0) for seed in seeds)
        return
    for trial in (Trial(arm.name, seed, folder / f"seed-{seed}") for seed in seeds):
        if read_numbers(trial.path, arm) is None:
            yield trial.seed, trial.done()


def without_duplicates(units: Iterable[Unit]) -> list[Unit]:
    """Units without trials that an earlier unit has as well: a case finds them wherever they were made."""
    known: set[tuple[str, str, int]] = set()
    found = []
    for unit in units:
        arms = {arm.name: identity(unit.case, arm, unit.seed) for arm in unit.case.config.arms}
        left = {name: n for name, n in unit.done.items() if arms[name] not in known}
        known |= {arms[name] for name in left}
        found += [dataclasses.replace(unit, done=left)] if left else []
    return found


def split_for(units: Sequence[Unit], jobs: int) -> list[Unit]:
    """Split work into pieces that keep `jobs` processes busy to the end: the longest units are split by arm.

    Arms in one process share what they are assembled from, so they stay together as long as no process is idle, and
    none would be long at work when the others have finished. What was begun goes first: a run that is stopped now and
    then ends with finished trials, not with many halves.
    """
    # More processes than trials have nothing to do.
    jobs = min(jobs, max(1, sum(len(unit.done) for unit in units)))
    pieces = sorted(units, key=lambda unit: -unit.work)
    whole = [unit for unit in pieces if len(unit.done) > 1]
    # One long trial keeps a process busy however the others are split.
    finest = [piece.work for unit in pieces for piece in _by_arm(unit)]
    even = max(_UNEVEN, _unevenness(finest, jobs))
    while whole and (len(pieces) < jobs or _unevenness([unit.work for unit in pieces], jobs) > even):
        longest = whole.pop(0)
        pieces.remove(longest)
        pieces += _by_arm(longest)
    return sorted(pieces, key=lambda unit: (not any(unit.done.values()), -unit.work))


def _by_arm(unit: Unit) -> list[Unit]:
    if len(unit.done) == 1:
        return [unit]
    return [dataclasses.replace(unit, done={arm: n}, part=True) for arm, n in unit.done.items()]


def _unevenness(works: Sequence[float], jobs: int) -> float:
    """The time that this work takes when an idle process takes the longest piece left, as a multiple of the time that
    it would take if it could be divided at will.

    >>> _unevenness([4, 4, 4, 4], 2), _unevenness([5, 5, 5], 2)
    (1.0, 1.3333333333333333)
    """
    busy = [0.0] * jobs
    for work in sorted(works, reverse=True):
        heapq.heapreplace(busy, busy[0] + work)
    total = sum(works)
    return max(busy) * jobs / total if total else 1.0


def execute(
    units: Sequence[Unit],
    out: Path,
    observer: Observer,
    *,
    jobs: int = 1,
    within: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Do units of the cases below `out`, see `work_off`."""
    runs = [open_folder(case, out) for case in {unit.folder: unit.case for unit in units}.values()]
    return work_off(units, runs, observer, jobs=jobs, within=within, clock=clock)


def work_off(
    units: Sequence[Unit],
    runs: Iterable[RunFolder],
    observer: Observer,
    *,
    jobs: int = 1,
    within: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Do all units of these runs in `jobs` processes, in their order; stop after `within` seconds.

    Every folder is locked meanwhile. A unit that fails does not stop the others.
    """
    deadline = _Deadline(None if within is None else clock() + within, clock)
    waiting = deque(units)
    with contextlib.ExitStack() as locks:
        by_path = {run.path: run for run in runs}
        for run in by_path.values():
            locks.enter_context(run.writing())
        if deadline.passed():
            failed = {}
        elif jobs == 1:
            failed = _in_this_process(waiting, observer, deadline)
        else:
            failed = _Pool(waiting, observer, deadline, min(jobs, max(1, len(units)))).run()
        # Reading every record of a folder takes seconds: those in which no unit was begun are as they were.
        begun = units[: len(units) - len(waiting)]
        for folder in dict.fromkeys(unit.folder for unit in begun):
            run = by_path[folder]
            run.write("summary.json", json.dumps(summarise(run), indent=2) + "\n")
    return Outcome(failed, deadline.passed())


def units_of_run(run: RunFolder) -> list[Unit]:
    """The seeds of a run of its own that are not finished."""
    case = Case(run.config.name, "", (), run.config)
    units = []
    for seed in seeds_of(run.config):
        done = {arm.name: run.trial(arm.name, seed).done() for arm in run.config.arms}
        left = {arm: n for arm, n in done.items() if n < run.config.rounds}
        units += [Unit(case, run.path, seed, left, 1.0, numbers=False)] if left else []
    return units


class _Deadline:
    """A deadline that, once passed, stays passed."""

    def __init__(self, at: float | None, clock: Callable[[], float]):
        self._at, self._clock = at, clock
        self._passed = False

    def passed(self) -> bool:
        self._passed = self._passed or (self._at is not None and self._clock() >= self._at)
        return self._passed


class _Progress:
    """A watcher of one unit that reports progress now and then."""

    def __init__(self, unit: Unit, report: Callable[[int, str], None]):
        self._unit, self._report = unit, report
        self._rounds, self._last, self._score = 0, 0.0, ""
        self._metrics: RunMetrics | None = None

    def start(self, run: RunFolder) -> None:
        """Nothing to prepare."""

    def round(self, trial: Trial, record: RoundRecord) -> None:
        """Count a round that an earlier process had not done."""
        if record["round"] <= self._unit.done[trial.arm]:
            return
        self._rounds += 1
        self._metrics = self._metrics or read_metrics(trial.root)
        self._score = self._metrics.tell(record.metrics) or self._score
        now = time.monotonic()
        if now - self._last >= _REPORT_EVERY or self._rounds == self._unit.rounds:
            self._last = now
            self._report(self._rounds, f"{trial.arm}  round {record['round']}  {self._score}".rstrip())

    def stop(self) -> None:
        """Nothing to close."""


class _Worker:
    """Does units one after the other; keeps the last data set, which the next unit often shares."""

    def __init__(self) -> None:
        self._loaded: tuple[object, Data] | None = None

    def do(self, unit: Unit, report: Callable[[int, str], None], stop: Callable[[], bool]) -> str:
        """Run a unit; returns its problem, or nothing."""
        config = unit.case.config
        pending = dataclasses.replace(config, arms=tuple(a for a in config.arms if a.name in unit.done))
        try:
            run = RunFolder(unit.folder, pending)
            run_seed(run, unit.seed, self._data(unit), [_Progress(unit, report)], stop=stop)
            trials = [run.trial(arm.name, unit.seed) for arm in pending.arms]
            for trial in trials:
                if unit.numbers and trial.done() >= pending.rounds:
                    write_numbers(trial, pending)
        except SafariError as error:
            return str(error)
        except Exception:
            # A plug-in's error, or a bug of ours: the other cases can still be done.
            return traceback.format_exc()
        return ""

    def _data(self, unit: Unit) -> Data:
        config = unit.case.config
        if self._loaded is None or self._loaded[0] != config.data:
            self._loaded = None  # before the next one is loaded, so that both are never in memory
            self._loaded = (config.data, load_data(config))
        return self._loaded[1]


def _in_this_process(waiting: deque[Unit], observer: Observer, deadline: _Deadline) -> dict[str, str]:
    worker, failed = _Worker(), {}
    while waiting and not deadline.passed():
        unit = waiting.popleft()
        observer.begin(0, unit)

        def report(rounds: int, text: str, unit: Unit = unit) -> None:
            observer.at(0, unit, rounds, text)

        problem = worker.do(unit, report, deadline.passed)
        if problem:
            failed[unit.label] = problem
        observer.end(0, unit, problem)
    return failed


class _Pool:
    """Processes with a pipe each: units go down, progress comes up, a closed pipe means a dead process."""

    def __init__(self, waiting: deque[Unit], observer: Observer, deadline: _Deadline, jobs: int):
        self._waiting, self._observer, self._deadline = waiting, observer, deadline
        self._busy: dict[int, Unit] = {}
        self._failed: dict[str, str] = {}
        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        self._pipes: dict[Connection, int] = {}
        self._processes: list[SpawnProcess] = []
        threads = max(1, cores() // jobs)
        permitted = dataclasses.replace(session(), pinned={})
        for worker in range(jobs):
            here, there = context.Pipe()
            process = context.Process(
                target=_process,
                args=(there, self._stop, threads, permitted),
                daemon=True,
            )
            with _environment(OMP_NUM_THREADS=str(threads)), _sigint_blocked():
                process.start()
            there.close()
            self._processes.append(process)
            self._pipes[here] = worker

    def run(self) -> dict[str, str]:
        """Do everything; returns the units that failed, each with the reason."""
        try:
            while self._pipes:
                if self._deadline.passed():
                    self._stop.set()
                for pipe in wait(list(self._pipes), timeout=_REPORT_EVERY):
                    if isinstance(pipe, Connection):
                        self._receive(pipe)
        finally:
            # Folders stay locked until no process writes into them any more.
            self._stop.set()
            for pipe in self._pipes:
                pipe.close()
            for process in self._processes:
                process.join(_STOP_TIMEOUT)
        for unit in self._waiting if not self._deadline.passed() else ():
            self._failed.setdefault(unit.label, "no process was left to do it")
        return self._failed

    def _receive(self, pipe: Connection) -> None:
        worker = self._pipes[pipe]
        try:
            kind, rounds, text = pipe.recv()
        except EOFError:
            del self._pipes[pipe]
            if worker in self._busy:
                self._end(worker, "its process ended without a word; was there enough memory?")
            return
        if kind == "at":
            self._observer.at(worker, self._busy[worker], rounds, text)
            return
        if kind == "end":
            self._end(worker, text)
        self._give(pipe)

    def _give(self, pipe: Connection) -> None:
        """Send an idle process its next unit, or nothing, and then it ends."""
        if not self._waiting or self._deadline.passed():
            pipe.send(None)
            return
        worker = self._pipes[pipe]
        self._busy[worker] = self._waiting.popleft()
        self._observer.begin(worker, self._busy[worker])
        pipe.send(self._busy[worker])

    def _end(self, worker: int, problem: str) -> None:
        unit = self._busy.pop(worker)
        if problem:
            self._failed[unit.label] = problem
        self._observer.end(worker, unit, problem)


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Processes started in here never receive Ctrl-C, not even while they import.

    The parent does, afterwards; it decides what Ctrl-C means, and passes it on as `stop`.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _process(pipe: Connection, stop: Any, threads: int, permitted: Session) -> None:
    # Where signals cannot be blocked before the start.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    worker, alone = _Worker(), False

    def report(rounds: int, text: str) -> None:
        nonlocal alone
        try:
            pipe.send(("at", rounds, text))
        except OSError:
            # The parent has gone, or no longer listens after Ctrl-C: save what has been done, and end.
            alone = True

    with inherited(permitted), contextlib.suppress(BrokenPipeError, EOFError):  # the parent has gone
        pipe.send(("ready", 0, ""))
        while (unit := pipe.recv()) is not None:
            problem = worker.do(unit, report, lambda: alone or stop.is_set())
            pipe.send(("end", 0, problem))
    pipe.close()


def cores() -> int:
    """Number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
