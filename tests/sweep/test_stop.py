"""Stopping for real: a signal to a process with processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sweep.kit import TINY, write


def start(folder: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "safari", "sweep", str(folder / "tiny.toml"), "--out", str(out),
               "--set", "rounds=100", "--set", "checkpoint.every=10", *more]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def wait_for(condition, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stop_loses_nothing_and_leaves_nobody_behind(tmp_path: Path, number: int) -> None:
    folder, out = write(tmp_path / "experiments", tiny=TINY), tmp_path / "out"
    first = start(folder, out, "--jobs", "2")
    wait_for(lambda: len(list(out.rglob("checkpoint.safetensors"))) >= 2)
    first.send_signal(number)
    _, told = first.communicate(timeout=60)
    assert first.returncode == (-number if number == signal.SIGKILL else 130), told
    sizes = {path: path.stat().st_size for path in out.rglob("rounds.jsonl")}
    if number == signal.SIGKILL:
        # Its processes notice at the next thing they have to tell.
        def quiet() -> bool:
            before = {path: path.stat().st_size for path in out.rglob("rounds.jsonl")}
            time.sleep(1.0)
            return before == {path: path.stat().st_size for path in out.rglob("rounds.jsonl")}

        wait_for(quiet)
    else:
        time.sleep(0.5)
        assert sizes == {path: path.stat().st_size for path in out.rglob("rounds.jsonl")}
    second = start(folder, out, "--jobs", "2")
    _, told = second.communicate(timeout=300)
    assert second.returncode == 0, told
    assert "12 of 12 trials are finished" in told
    straight = start(folder, tmp_path / "straight")
    straight.communicate(timeout=300)
    for path in (tmp_path / "straight").rglob("rounds.jsonl"):
        assert (out / path.relative_to(tmp_path / "straight")).read_text() == path.read_text()


@pytest.mark.slow
def test_ctrl_c_while_processes_start_is_told_in_words(tmp_path: Path) -> None:
    folder, out = write(tmp_path / "experiments", tiny=TINY), tmp_path / "out"
    first = start(folder, out, "--jobs", "2")
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children")
    # Two that work and one that Python keeps for them; all are busy with their imports for a second or two.
    wait_for(lambda: len(children.read_text().split()) >= 3)
    time.sleep(0.5)
    # A terminal's Ctrl-C goes to all of them.
    os.killpg(first.pid, signal.SIGINT)
    _, told = first.communicate(timeout=60)
    assert first.returncode == 130, told
    assert "Traceback" not in told
    assert "0 of 12 trials are finished; nothing is lost: the same command goes on" in told


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_has_been_done_is_saved_where_no_checkpoint_is_due(tmp_path: Path, number: int) -> None:
    """Also when the parent is killed: its processes save and end when they notice."""
    folder, out = write(tmp_path / "experiments", tiny=TINY), tmp_path / "out"
    first = start(folder, out, "--jobs", "2", "--set", "rounds=3000", "--set", "checkpoint.every=3000")
    wait_for(lambda: sum(path.stat().st_size > 5000 for path in out.rglob("rounds.jsonl")) >= 2)
    assert not list(out.rglob("checkpoint.safetensors"))
    first.send_signal(number)
    first.communicate(timeout=60)
    wait_for(lambda: len(list(out.rglob("checkpoint.safetensors"))) >= 2)
