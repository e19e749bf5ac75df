"""Kill -9 at random moments over a run: what is resumed ends bit-equal to what was never killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import safari
from runs.kit import RESUME, RUN, TINY, checkpoints, environment, leftovers, results
from safari.runs import RunFolder, Trial, read_checkpoint, read_lines

# Every part that keeps a state does: clients, the mask policy, the server's step, the average.
LONG = {
    **TINY,
    "rounds": 60,
    "seeds": 2,
    "pruning": {"pruner": "rand", "scope": "erk"},
    "policy": {"name": "rigl", "interval": 4},
    "client": {"name": "scaffold"},
    "aggregation": {"average": 0.9, "steps": [{"name": "fedadam", "lr": 0.01}]},
}
TRIALS = [(arm, seed) for arm in LONG["arms"] for seed in (0, 1)]


def spawn(run: Path) -> subprocess.Popen[str]:
    """Begin the run, or go on with it, in a process of its own."""
    known = (run / "config.toml").exists()
    arguments = [RESUME, str(run)] if known else [RUN, json.dumps(LONG), str(run)]
    return subprocess.Popen(
        [sys.executable, "-c", *arguments], stderr=subprocess.PIPE, text=True, env=environment()
    )


def records(run: Path) -> int:
    """How many bytes of records there are, over all trials."""
    return sum(file.stat().st_size for file in run.glob("trials/*/*/rounds.jsonl"))


def wait(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    """Until something is so, or the process has ended by itself."""
    deadline = time.monotonic() + 60
    while process.poll() is None and not ready():
        assert time.monotonic() < deadline, "the process does nothing"
        time.sleep(0.0005)


def at_a_place(process: subprocess.Popen[str], run: Path, place: int, rng: random.Random) -> None:
    """Right after the records have grown to a place in the run; at once when they are there already."""
    begun = records(run)
    wait(process, lambda: records(run) != begun)
    wait(process, lambda: records(run) >= place)


def in_a_round(process: subprocess.Popen[str], run: Path, place: int, rng: random.Random) -> None:
    """Some milliseconds later: mostly while clients train."""
    at_a_place(process, run, place, rng)
    time.sleep(rng.uniform(0, 0.02))


def in_a_checkpoint(process: subprocess.Popen[str], run: Path, place: int, rng: random.Random) -> None:
    """While a checkpoint has its temporary name, or just after; soon, where the disk is too fast to see."""
    at_a_place(process, run, place, rng)
    soon = records(run) + 5_000
    wait(process, lambda: any("checkpoint" in name for name in leftovers(run)) or records(run) > soon)


def at_the_start(process: subprocess.Popen[str], run: Path, place: int, rng: random.Random) -> None:
    """While the process still starts, takes the lock, or cuts records back."""
    time.sleep(rng.uniform(0, 1.5))


MOMENTS = [in_a_round, in_a_checkpoint, at_a_place, in_a_round, at_the_start]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "run"
    safari.run(LONG, path)
    return path


@pytest.mark.parametrize("kills", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 20))])
def test_kills_leave_no_trace(reference, tmp_path, kills):
    rng = random.Random(20)
    total, run = records(reference), tmp_path / "run"
    places = sorted(rng.randrange(int(0.85 * total)) for _ in range(kills))
    reached, cut_off = [], 0
    for number, place in enumerate(places):
        process = spawn(run)
        MOMENTS[number % len(MOMENTS)](process, run, place, rng)
        process.send_signal(signal.SIGKILL)
        errors = process.communicate()[1]
        assert process.returncode == -signal.SIGKILL, f"kill {number} met no living process: {errors}"
        reached.append(records(run))
        cut_off += any(beyond_its_checkpoint(trial) for trial in RunFolder.open(run).trials())
    assert reached[-1] > total / 2, "the kills were all in the first half of the run"
    assert len(set(reached)) > kills // 2, "the kills were all at the same place"
    assert cut_off > kills // 2, "hardly any kill lost a round"
    assert not (run / "summary.json").exists()

    last = spawn(run)
    errors = last.communicate()[1]
    assert last.returncode == 0, errors
    assert results(run) == results(reference)
    assert checkpoints(run) == checkpoints(reference)
    assert len(checkpoints(run)) == len(TRIALS)
    assert leftovers(run) == []
    for trial in RunFolder.open(run).trials():
        assert [line["round"] for line in read_lines(trial.timings)] == list(range(1, LONG["rounds"] + 1))


def beyond_its_checkpoint(trial: Trial) -> bool:
    """Are there rounds that will have to be done again?"""
    done = read_checkpoint(trial.checkpoint).round if trial.checkpoint.exists() else 0
    return len(trial.records()) > done


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_stop_frees_the_folder_and_can_be_resumed(reference, tmp_path, number):
    run = tmp_path / "run"
    process = spawn(run)
    at_a_place(process, run, records(reference) // 3, random.Random(0))
    process.send_signal(number)
    process.communicate()
    assert process.returncode == -number
    assert records(run) < records(reference)
    safari.resume(run)
    assert results(run) == results(reference)
    assert checkpoints(run) == checkpoints(reference)
    assert leftovers(run) == []
