"""A full disk, a file that may not grow, a folder that may not be written: the real things."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import safari
from runs.kit import RESUME, TINY, checkpoints, leftovers, python, results
from safari.errors import RunError
from safari.runs import RunFolder, read_checkpoint, summarise

# What the child may write to one file is limited after the imports: Python's own caches are not our subject.
LIMITED = """
import json, resource, sys, safari
from safari.errors import RunError
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), hard))
try:
    safari.run(json.loads(sys.argv[1]), sys.argv[2], progress=False)
except RunError as error:
    sys.exit(f"RunError: {error}")
"""
CONFIG = {**TINY, "rounds": 16}
MESSAGE = "RunError: cannot write {}: {}; what was there before is untouched\n"


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "run"
    safari.run(CONFIG, path)
    return path


def whole_lines(run: Path) -> dict[str, int]:
    """How many lines each record file holds; none may be half there."""
    counts = {}
    for file in run.glob("trials/*/*/*.jsonl"):
        text = file.read_text()
        assert text == "" or text.endswith("\n"), f"{file} ends in a half line: {text[-60:]!r}"
        counts[str(file.relative_to(run))] = len([json.loads(line) for line in text.splitlines()])
    return counts


def assert_same(run: Path, reference: Path) -> None:
    assert results(run) == results(reference)
    assert checkpoints(run) == checkpoints(reference)
    assert leftovers(run) == []


@pytest.mark.slow
def test_a_record_that_does_not_fit_is_not_written_at_all(tmp_path, reference):
    ends = {}
    for arm in CONFIG["arms"]:
        lines = (reference / f"trials/{arm}/seed-0/rounds.jsonl").read_bytes().splitlines(keepends=True)
        ends[arm] = list(itertools.accumulate(map(len, lines)))
    # In the middle of round 14 of the longer file: its arm will be the one that fails.
    arm, other = sorted(ends, key=lambda arm: -ends[arm][13])
    limit = max((ends[arm][12] + ends[arm][13]) // 2, ends[other][13])
    assert max(map(len, checkpoints(reference).values())) < limit < ends[arm][13], "another would fail first"

    run = tmp_path / "run"
    child = python("-c", LIMITED, json.dumps(CONFIG), str(run), str(limit))

    assert child.returncode == 1
    assert child.stderr == MESSAGE.format(run / f"trials/{arm}/seed-0/rounds.jsonl", "File too large")
    lines = whole_lines(run)
    assert lines[f"trials/{arm}/seed-0/rounds.jsonl"] == 13
    assert lines[f"trials/{arm}/seed-0/timings.jsonl"] == 14
    assert leftovers(run) == []
    assert read_checkpoint(run / f"trials/{arm}/seed-0/checkpoint.safetensors").round == 12
    resumed = python("-c", RESUME, str(run))
    assert resumed.returncode == 0, resumed.stderr
    assert_same(run, reference)


def test_a_checkpoint_that_does_not_fit_leaves_the_old_one(tmp_path, reference):
    # The rule safari has a larger checkpoint than drop, so that the limit can lie between the two.
    small, large = (
        (reference / f"trials/{arm}/seed-0/checkpoint.safetensors").stat().st_size
        for arm in ("drop", "safari")
    )
    # In the middle, because the last round's number has a digit more than the first checkpoint's.
    limit = (small + large) // 2
    assert small + 8 < limit < large - 8
    run = tmp_path / "run"
    child = python("-c", LIMITED, json.dumps(CONFIG), str(run), str(limit))

    assert child.returncode == 1
    assert child.stderr == MESSAGE.format(
        run / "trials/safari/seed-0/checkpoint.safetensors", "File too large"
    )
    assert set(whole_lines(run).values()) == {3}, "both arms had done the three rounds to the checkpoint"
    assert list(checkpoints(run)) == ["trials/drop/seed-0/checkpoint.safetensors"]
    assert leftovers(run) == []
    safari.resume(run)
    assert_same(run, reference)


def test_an_old_checkpoint_survives_a_failed_new_one(tmp_path, reference):
    run = RunFolder.open(Path(shutil.copytree(reference, tmp_path / "run")))
    before = checkpoints(run.path)
    code = """
import resource, sys, torch
from pathlib import Path
from safari.runs import RunFolder, Saved
trial = RunFolder.open(Path(sys.argv[1])).trial("drop", 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
trial.save(Saved(99, {"model": torch.zeros(10_000)}, {}))
"""
    child = python("-c", code, str(run.path))
    assert "safari.errors.RunError: cannot write" in child.stderr
    assert checkpoints(run.path) == before
    assert leftovers(run.path) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with 64 kB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_more_space_lets_it_go_on(small_disk, tmp_path):
    config = {**TINY, "rounds": 40}
    run = small_disk / "run"
    code = LIMITED.replace("resource.setrlimit", "(lambda *ignored: None)")
    child = python("-c", code, json.dumps(config), str(run), "0")

    assert child.returncode == 1
    assert child.stderr.startswith(f"RunError: cannot write {run}/")
    assert child.stderr.endswith(": No space left on device; what was there before is untouched\n")
    reached = whole_lines(run)
    assert 0 < min(reached.values()) < 40
    assert leftovers(run) == []

    # What is redone after the checkpoint may just fit again, and then the next thing does not.
    again = python("-c", RESUME, str(run))
    assert again.returncode == 1
    assert ": No space left on device; what was there before is untouched" in again.stderr
    assert 0 < min(whole_lines(run).values()) < 40

    subprocess.run(["mount", "-o", "remount,size=10m", str(small_disk)], check=True)
    safari.resume(run)
    safari.run(config, tmp_path / "reference")
    assert_same(run, tmp_path / "reference")


@pytest.fixture
def read_only(reference, tmp_path, request):
    """A finished run that may be read and not written, and the system's word for that.

    Root may write whatever the permissions say, so it gets a file system that is read-only.
    """
    if os.geteuid() == 0:
        place = request.getfixturevalue("small_disk")
        subprocess.run(["mount", "-o", "remount,size=1m", str(place)], check=True)
        shutil.copytree(reference, place / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        yield place / "run", "Read-only file system"
        return
    run = Path(shutil.copytree(reference, tmp_path / "run"))
    (run / ".lock").chmod(0o444)
    folders = [run, *(path for path in run.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    yield run, "Permission denied"
    for folder in folders:
        folder.chmod(0o755)


def test_a_read_only_folder_says_so(read_only):
    run, reason = read_only
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(RunError) as error:
        safari.resume(run)
    assert str(error.value) == f"cannot lock {run}: {reason}"
    with pytest.raises(RunError) as error:
        safari.run(TINY, run / "new")
    assert str(error.value) == f"cannot write {run}/new: {reason}; what was there before is untouched"
    assert list(summarise(RunFolder.open(run))["arms"]) == ["drop", "safari"], "reading needs no writing"
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
