"""The rounds that are still to be done, spread over processes: each takes one seed of a case at a time, or,
where there are more processes than that, one arm of it.

A case is an ordinary run's folder. Its trials stand alone, so a finished one is never run twice, and one that
was interrupted goes on from its checkpoint: `safari resume` would do the same, one folder at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch

from safari.data import Data
from safari.engine import load_data, run_seed
from safari.errors import RunError, SafariError
from safari.evidence.book import Book, identity
from safari.evidence.numbers import read_numbers, write_numbers
from safari.evidence.plan import Case, digest
from safari.runs import RunFolder, Trial, seeds_of, summarise
from safari.runs.files import write_atomically
from safari.toml import to_toml

# How often a process tells how far it is, in seconds.
_TELLING = 0.25
# How long a process may take for the round that it is in when everything is to stop.
_PATIENCE = 20.0


@dataclass(frozen=True)
class Unit:
    """One seed of a case: the arms that are not finished, and how many rounds of each are done.

    `part`: `done` holds one arm of several; the others are units of their own.
    """

    case: Case
    folder: Path
    seed: int
    done: Mapping[str, int]
    # What a round counts for in the estimate of the time left.
    weight: float
    part: bool = False

    @property
    def rounds(self) -> int:
        """How many rounds are to be done, over the arms."""
        return sum(self.case.config.rounds - done for done in self.done.values())

    @property
    def work(self) -> float:
        """The same in the estimate's seconds."""
        return self.weight * self.rounds

    @property
    def label(self) -> str:
        """What a person reads."""
        arm = f" {', '.join(self.done)}" if self.part else ""
        return f"{self.case.experiment}/{self.case.name} seed {self.seed}{arm}"


class Audience(Protocol):
    """Who is told how it goes."""

    def begin(self, worker: int, unit: Unit) -> None:
        """A process has begun with a unit."""

    def at(self, worker: int, unit: Unit, rounds: int, text: str) -> None:
        """It has done so many of its rounds; `text` says where it is."""

    def end(self, worker: int, unit: Unit, problem: str) -> None:
        """It is through with it, or has failed with a problem."""


@dataclass(frozen=True)
class Ending:
    """What came of it: units that failed, with why, and whether the time was up before all were done."""

    failed: Mapping[str, str]
    stopped: bool


class Stopped(Exception):  # noqa: N818 - asked for, not an error
    """The time is up: what was done up to the last checkpoint stays."""


def place(case: Case, out: Path) -> RunFolder:
    """The run's folder of a case: new, or the one that is there, with the arms and seeds now asked for."""
    path = out / case.experiment / case.folder
    if not (path / "config.toml").exists():
        return RunFolder.create(path, case.config)
    there = RunFolder.open(path).config
    if digest(there) != digest(case.config):
        raise RunError(f"{path} holds another setting than its name says; move it away")
    if there != case.config:
        write_atomically(path / "config.toml", to_toml(case.config).encode())
    return RunFolder(path, case.config)


def units_of(case: Case, out: Path, book: Book, weight: float) -> list[Unit]:
    """The seeds of a case that are not finished: neither in the book nor in the folder."""
    path = out / case.experiment / case.folder
    units = []
    for seed in seeds_of(case.config):
        pending = {}
        for arm in (arm for arm in case.config.arms if case.home(arm) is case):
            trial = Trial(arm.name, seed, path / "trials" / arm.name / f"seed-{seed}")
            if book.trial(case, arm, seed) is None and read_numbers(trial.path, arm) is None:
                pending[arm.name] = trial.done()
        if pending:
            units.append(Unit(case, path, seed, pending, weight))
    return units


def once(units: Iterable[Unit]) -> list[Unit]:
    """The same without trials that an earlier unit has, too: a case finds them wherever they were made."""
    known: set[tuple[str, str, int]] = set()
    found = []
    for unit in units:
        arms = {arm.name: identity(unit.case, arm, unit.seed) for arm in unit.case.config.arms}
        left = {name: n for name, n in unit.done.items() if arms[name] not in known}
        known |= {arms[name] for name in left}
        found += [dataclasses.replace(unit, done=left)] if left else []
    return found


def shared_out(units: Sequence[Unit], jobs: int) -> list[Unit]:
    """The same work in at least `jobs` pieces, if it has so many: the longest are taken apart by arm.

    Arms in one process share what they are assembled from, so they stay together as long as nobody waits.
    What was begun goes on first: who stops now and then has finished trials, not many halves.
    """
    pieces = sorted(units, key=lambda unit: -unit.work)
    whole = [unit for unit in pieces if len(unit.done) > 1]
    while whole and len(pieces) < jobs:
        longest = whole.pop(0)
        pieces.remove(longest)
        pieces += [dataclasses.replace(longest, done={a: n}, part=True) for a, n in longest.done.items()]
    return sorted(pieces, key=lambda unit: (not any(unit.done.values()), -unit.work))


def execute(
    units: Sequence[Unit],
    out: Path,
    audience: Audience,
    *,
    jobs: int = 1,
    within: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Ending:
    """Do all units in `jobs` processes, the first ones first; stop after `within` seconds.

    Every folder is held while this goes on. A unit that fails leaves the others alone.
    """
    deadline = None if within is None else clock() + within
    with contextlib.ExitStack() as held:
        runs = {unit.folder: place(unit.case, out) for unit in units}
        for run in runs.values():
            held.enter_context(run.writing())
        over = _Over(deadline, clock)
        do = _alone if jobs == 1 else _together
        failed = do(units, audience, min(jobs, max(1, len(units))), over)
        for run in runs.values():
            run.write("summary.json", json.dumps(summarise(run), indent=2) + "\n")
    return Ending(failed, over())


class _Over:
    """Is the time up?"""

    def __init__(self, deadline: float | None, clock: Callable[[], float]):
        self._deadline, self._clock = deadline, clock
        self._seen = False

    def __call__(self) -> bool:
        self._seen = self._seen or (self._deadline is not None and self._clock() >= self._deadline)
        return self._seen


class _Relay:
    """A watcher of one unit that passes on, now and then, how far it is, and ends it when it is to stop."""

    def __init__(self, unit: Unit, tell: Callable[[int, str], None], stop: Callable[[], bool]):
        self._unit, self._tell, self._stop = unit, tell, stop
        self._rounds, self._told, self._score = 0, 0.0, ""

    def start(self, run: RunFolder) -> None:
        """Nothing to prepare."""

    def round(self, trial: Trial, record: Mapping[str, Any]) -> None:
        """Count a round that an earlier process had not done."""
        if record["round"] <= self._unit.done[trial.arm]:
            return
        self._rounds += 1
        if record["top1"] is not None:
            self._score = f"top-1 {record['top1']:.1%}"
        now = time.monotonic()
        if now - self._told >= _TELLING or self._rounds == self._unit.rounds:
            self._told = now
            self._tell(self._rounds, f"{trial.arm}  round {record['round']}  {self._score}".rstrip())
        if self._stop():
            raise Stopped

    def stop(self) -> None:
        """Nothing to close."""


class _Hand:
    """Does units one after the other; keeps the last data set, which the next unit often shares."""

    def __init__(self) -> None:
        self._kept: tuple[object, Data] | None = None

    def do(self, unit: Unit, tell: Callable[[int, str], None], stop: Callable[[], bool]) -> str:
        """Run a unit; returns what went wrong, or nothing."""
        config = unit.case.config
        pending = dataclasses.replace(config, arms=tuple(a for a in config.arms if a.name in unit.done))
        try:
            if self._kept is None or self._kept[0] != config.data:
                self._kept = None
                self._kept = (config.data, load_data(config))
            run = RunFolder(unit.folder, pending)
            run_seed(run, unit.seed, self._kept[1], [_Relay(unit, tell, stop)])
            for arm in pending.arms:
                write_numbers(run.trial(arm.name, unit.seed), pending)
        except Stopped:
            return ""
        except SafariError as error:
            return str(error)
        except Exception:
            # Somebody's plug-in, or a mistake of ours: the other cases can still be done.
            return traceback.format_exc()
        return ""


def _alone(units: Sequence[Unit], audience: Audience, jobs: int, over: _Over) -> dict[str, str]:
    hand, failed = _Hand(), {}
    for unit in units:
        if over():
            break
        audience.begin(0, unit)

        def tell(rounds: int, text: str, unit: Unit = unit) -> None:
            audience.at(0, unit, rounds, text)

        problem = hand.do(unit, tell, over)
        if problem:
            failed[unit.label] = problem
        audience.end(0, unit, problem)
    return failed


def _together(units: Sequence[Unit], audience: Audience, jobs: int, over: _Over) -> dict[str, str]:  # noqa: C901
    """A process a job, each with a pipe: units go down it, news come up, and its end is the process' end."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    waiting, failed = list(units), dict[str, str]()
    busy: dict[int, Unit] = {}
    pipes: dict[Connection, int] = {}
    processes = []
    for worker in range(jobs):
        here, there = context.Pipe()
        threads = max(1, cores() // jobs)
        process = context.Process(target=_process, args=(there, stop, threads), daemon=True)
        with _environment(OMP_NUM_THREADS=str(threads)), _deaf():
            process.start()
        there.close()
        processes.append(process)
        pipes[here] = worker

    def give(pipe: Connection) -> None:
        worker = pipes[pipe]
        if not waiting or over():
            pipe.send(None)
            return
        busy[worker] = waiting.pop(0)
        audience.begin(worker, busy[worker])
        pipe.send(busy[worker])

    def through(worker: int, problem: str) -> None:
        unit = busy.pop(worker)
        if problem:
            failed[unit.label] = problem
        audience.end(worker, unit, problem)

    try:
        while pipes:
            if over():
                stop.set()
            for pipe in wait(list(pipes), timeout=_TELLING):
                if not isinstance(pipe, Connection):
                    continue
                worker = pipes[pipe]
                try:
                    kind, rounds, text = pipe.recv()
                except EOFError:
                    del pipes[pipe]
                    if worker in busy:
                        through(worker, "its process ended without a word; was there enough memory?")
                    continue
                if kind == "at":
                    audience.at(worker, busy[worker], rounds, text)
                    continue
                if kind == "end":
                    through(worker, text)
                give(pipe)
    finally:
        # Folders are held until nobody writes into them.
        stop.set()
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(_PATIENCE)
    for unit in waiting if not over() else ():
        failed.setdefault(unit.label, "no process was left to do it")
    return failed


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """What is started in here never hears Ctrl-C, not even while it imports; its parent hears it afterwards.

    The parent decides what Ctrl-C means, and tells by `stop`.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _process(pipe: Connection, stop: Any, threads: int) -> None:
    # Where nobody could be started deaf.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    hand = _Hand()
    with contextlib.suppress(BrokenPipeError, EOFError):  # the parent is gone: nobody to work for
        pipe.send(("ready", 0, ""))
        while (unit := pipe.recv()) is not None:
            problem = hand.do(unit, lambda rounds, text: pipe.send(("at", rounds, text)), stop.is_set)
            pipe.send(("end", 0, problem))
    pipe.close()


def cores() -> int:
    """How many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@contextlib.contextmanager
def _environment(**values: str) -> Any:
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
