"""`safari net serve` as a process: it says why it ends, leaves nothing behind, and keeps to its own folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")
pytest.importorskip("raptorq", reason="needs the extra net: pip install 'safari-fl[net]'")

from click.testing import CliRunner

import safari
from flower.kit import Loopback
from processes import free_port, wait_until
from safari.cli import cli
from safari.engine.sample import next_upload
from safari.flower import SafariStrategy
from safari.lab.app import check, world_of
from safari.lab.launch import Lab
from safari.processes import family
from safari.runs import RunFolder

WORKER = "import subprocess, sys, time; {more}; time.sleep(300)"
CHILD = WORKER.format(
    more="subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True)"
)
PARENT = WORKER.format(
    more="from safari.processes import supervised as s; subprocess.Popen(s([sys.executable, '-c', sys.argv[1]]))"
)


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("who", "how"),
    # A supervisor that is killed is left out: nobody could end the others.
    [("parent", signal.SIGTERM), ("parent", signal.SIGKILL), ("supervisor", signal.SIGTERM)],
)
def test_what_was_started_ends_with_the_process_that_started_it(who, how):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdin=subprocess.DEVNULL)
    try:
        pids = wait_until(
            "four processes", lambda: found if len(found := family(parent.pid)) == 4 else None, 60
        )
        os.kill(pids[0 if who == "parent" else 1], how)
        if who == "parent":
            parent.wait(60)
            wait_until("all are gone", lambda: gone(pids), 60)
        else:
            # The supervisor stays a zombie, because its parent does not wait for it.
            wait_until("both below it are gone", lambda: gone(pids[2:]), 60)
    finally:
        parent.kill()
        parent.wait()


def serve(out: Path, *more: object) -> list[str]:
    ports = "--port", free_port(), "--data-port", free_port()
    command = [sys.executable, "-m", "safari", "net", "serve"]
    command += ["--clients", "2", "--host", "127.0.0.1", "--out", str(out)]
    return [*command, *map(str, [*ports, *more])]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_the_reason_is_told_and_a_killed_server_leaves_nothing(tmp_path):
    out = tmp_path / "a lab"
    with (tmp_path / "log").open("wb") as log:
        killed = subprocess.Popen(serve(out), stdin=subprocess.DEVNULL, stderr=log)
        try:
            # The SuperLink and the gate with their supervisors, and the app of the run.
            run = out / "run" / "config.toml"
            wait_until("the run has begun", run.exists, 180)
            pids = family(killed.pid)
            assert len(pids) >= 6
        finally:
            killed.kill()
            killed.wait()
    wait_until("all are gone", lambda: gone(pids), 60)
    # The same folder; nobody joins.
    again = subprocess.run(
        serve(out, "--wait", 1, "--rounds", 3),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    told = again.stderr.splitlines()[-1]
    assert told.startswith("error: the run ended: ")
    assert "after round 0: 0 of 2 nodes are connected after 1 s" in told
    assert again.returncode == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_server_that_is_asked_to_end_does_so_in_good_order(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(serve(tmp_path / "lab"), stdin=subprocess.DEVNULL, stderr=log)
        try:
            wait_until(
                "clients are told how to join",
                lambda: b"safari net join" in (tmp_path / "log").read_bytes(),
                180,
            )
            pids = family(server.pid)
            server.send_signal(signal.SIGTERM)
            assert server.wait(90) == 0
        finally:
            server.kill()
            server.wait()
    assert (tmp_path / "log").read_text().endswith("stopped by SIGTERM; the same command goes on\n")
    wait_until("all are gone", lambda: gone(pids), 60)


SETTINGS = {
    "seed": 0, "rounds": 2, "clients": 2, "rule": "drop", "model": "mlp", "sparsity": 0.8, "values": "",
}  # fmt: skip


def fails(message: object, context: object) -> None:
    raise RuntimeError("no data here")


def begun(run: Path, **more: object) -> Path:
    """A run of one round, as the app leaves it, with clients that answer with an error."""
    world = world_of(SETTINGS | more)
    strategy = SafariStrategy(world.fresh_module(), 2, "drop", config=world.config, run=run, give_up=None)
    strategy.start(Loopback({1: fails, 2: fails}), num_rounds=1, timeout=1)
    return run


@pytest.mark.parametrize("preset", ["", "best"])
def test_the_next_upload_of_a_federation_can_be_looked_at(tmp_path, preset):
    """Its checkpoints have neither links nor what clients keep."""
    run = RunFolder.open(begun(tmp_path / "run", preset=preset))
    first = next_upload(run, client=1)
    assert first.mask.shape == first.vector.shape
    assert (first.vector[~first.mask] == 0).all()
    found = CliRunner().invoke(cli, ["wire", "bench", str(run.path)])
    assert found.exit_code == 0
    assert "dense float32" in found.output


def test_another_setting_is_refused_before_anything_starts(tmp_path):
    run = begun(tmp_path / "run")
    check(SETTINGS, run)
    check(SETTINGS | {"rounds": 9}, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(safari.SafariError, match=r"pruning\.sparsity was 0\.8 and is 0\.9\. Put that back"):
        check(SETTINGS | {"sparsity": 0.9}, run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.toml").write_text("rounds = 1\n")
    found = CliRunner().invoke(cli, serve(out)[3:])
    assert str(found.exception) == f"{out} must be new, empty, or of this command, and holds 'config.toml'"
    assert [path.name for path in out.iterdir()] == ["config.toml"]


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_port_that_is_taken_is_told_before_a_folder_is_made(tmp_path, kind):
    with socket.socket(type=kind) as taken:
        taken.bind(("0.0.0.0", 0))
        if kind == socket.SOCK_STREAM:
            taken.listen()
        port = taken.getsockname()[1]
        option = "--port" if kind == socket.SOCK_STREAM else "--data-port"
        found = CliRunner().invoke(cli, serve(tmp_path / "new", option, port)[3:])
    assert str(found.exception).endswith(f"port {port}: Address already in use")
    assert not (tmp_path / "new").exists()


WITHOUT = "import sys; sys.modules[sys.argv.pop(1)] = None; from safari.cli import main; main()"


@pytest.mark.parametrize("library", ["flwr", "raptorq", "httpx"])
@pytest.mark.parametrize("command", ["serve", "join localhost:1 --client 0 --clients 2 --token a"])
def test_an_extra_that_is_missing_is_told(library, command):
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT, library, "net", *command.split()], capture_output=True, text=True
    )
    assert found.stderr == (
        f"error: 'safari net' and its gate need {library}: pip install 'safari-fl[flower,net]'\n"
    )
    assert found.returncode == 2


def test_an_earlier_lab_is_taken_up_again(tmp_path):
    def commands() -> str:
        lab = Lab(tmp_path / "lab", "127.0.0.1", 8000, 8001, SETTINGS)
        lab.prepare()
        return (lab.invitations.folder / "commands.txt").read_text()

    first = commands()
    (tmp_path / "lab" / "run").mkdir()
    (tmp_path / "lab" / "run" / "failure.txt").write_text("of the run before")
    assert commands() == first
    assert not (tmp_path / "lab" / "run" / "failure.txt").exists()
