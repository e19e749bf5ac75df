"""The live page under attack: tokens, spoilt run folders, floods of connections. With real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
import torch

from runs.kit import environment
from safari.config import Plug, parse
from safari.errors import SafariError
from safari.runs import RunFolder, Saved
from safari.view.limits import DEFAULT_LIMITS, Limits, Reporter
from safari.view.monitor import Monitor
from safari.view.server import build
from view.made_up import record
from view.test_server import ask, served, serving, stream

pytest.importorskip("uvicorn", reason="the extra 'view' is not installed")

CONFIG = {"name": "spoilt", "rounds": 50, "clients": 3, "arms": ["drop", "safari"]}


def made(path, config=None):
    """A run whose two arms have one round each."""
    run = RunFolder.create(path, config or parse(CONFIG))
    for arm in ("drop", "safari"):
        run.trial(arm, 0).append(record(1), {"train": 0.1})
    return run


# --- who is let in


@pytest.mark.parametrize("token", ["", " ", "\t\n", "a\x1bb", "\udcff"])
def test_a_token_that_lets_everybody_in_or_fits_no_address_is_refused(tmp_path, token):
    with pytest.raises(SafariError) as error:
        build(Monitor([made(tmp_path / "run")]), token)
    assert str(error.value) == f"token must be printable and not empty, got {token!r}"


def test_an_empty_token_is_refused_by_the_command(tmp_path):
    made(tmp_path / "run")
    command = [sys.executable, "-m", "safari", "view", str(tmp_path / "run"), "--no-browser", "--port", "0"]
    found = subprocess.run(
        [*command, "--host", "0.0.0.0", "--token", ""],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "error: token must be printable and not empty, got ''\n"


@pytest.mark.parametrize("token", ["a&b=c #1+2%41", "é日本", 'a"b;c,d\\e', "x" * 500])
def test_the_printed_address_opens_the_page_whatever_the_token(tmp_path, token):
    from safari.view.server import address_of

    with served([made(tmp_path / "run")], token=token, hosts=None) as address:
        place = urlsplit(address_of("127.0.0.1", urlsplit(address).port, token))
        status, headers, _ = ask(address, f"{place.path}?{place.query}")
        assert status == 303
        cookie = headers["set-cookie"].split(";")[0]
        assert ask(address, "/", headers={"Cookie": cookie})[0] == 200
        assert ask(address, "/", headers={"Cookie": cookie[:-1]})[0] == 403
        assert token not in str(headers)


# --- what a run's files may hold


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["fifo", "link"])
def test_who_writes_a_run_is_read_from_a_plain_file_only(tmp_path, make):
    """Reading a FIFO waits for ever, and a device has no end: in a process of its own, which can be given up."""
    run = made(tmp_path / "run")
    make(run.path / ".writer")
    code = """
import pathlib, resource, sys
from safari.runs import RunFolder
from safari.view.monitor import Monitor
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, resource.getrlimit(resource.RLIMIT_AS)[1]))
print(Monitor([RunFolder.open(pathlib.Path(sys.argv[1]))]).describe()["runs"][0]["state"])
"""
    command = [sys.executable, "-c", code, str(run.path)]
    found = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stdout) == (0, "stopped\n"), found.stderr


def test_a_link_does_not_say_who_writes_a_run(tmp_path):
    run = made(tmp_path / "run")
    (tmp_path / "mine").write_text(f"{os.getpid()}\n")
    (run.path / ".writer").symlink_to(tmp_path / "mine")
    assert Monitor([run]).describe()["runs"][0]["state"] == "stopped"


def deep(levels):
    return "[" * levels + "]" * levels


def nested(levels):
    found = []
    for _ in range(levels):
        found = [found]
    return found


def long_seconds(run):
    run.trial("drop", 0).timings.open("a").write('{"round": 2, "train": 1' + "0" * 400 + "}\n")


def long_round_of_seconds(run):
    run.trial("drop", 0).timings.open("a").write('{"round": 1' + "0" * 400 + ', "train": 1}\n')


def deep_config(run):
    path = run.path / "config.toml"
    path.write_text(path.read_text().replace("[uplink]\n", f"[uplink]\nodd = {deep(2000)}\n"))


def odd_checkpoint(run):
    run.trial("drop", 0).save(Saved(1, {"rule.similarity": torch.zeros(3, 3, dtype=torch.bfloat16)}, {}))


def long_model(run):
    (run.path / "model.json").write_text('{"numbers": 1' + "0" * 400 + "}")


def link_for_a_file(run):
    (run.path / "outside").write_text(json.dumps(record(2, top1=0.9)) + "\n")
    rounds = run.trial("drop", 0).rounds
    rounds.unlink()
    rounds.symlink_to(run.path / "outside")


def fifo_for_a_file(run):
    timings = run.trial("drop", 0).timings
    timings.unlink()
    os.mkfifo(timings)


def deep_side_file(run):
    (run.path / "environment.json").write_text(f'{{"x": {deep(100_000)}}}')


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (long_seconds, "timings.jsonl, line 2 was skipped: not the seconds of a round"),
        (long_round_of_seconds, "timings.jsonl, line 2 was skipped: round 1000"),
        (deep_config, "the newest config.toml cannot be shown"),
        (odd_checkpoint, "rule.similarity must be of F16, F32, F64, got BF16"),
        (long_model, ""),
        (link_for_a_file, "trials/drop/seed-0/rounds.jsonl"),
        (fifo_for_a_file, "trials/drop/seed-0/timings.jsonl"),
        (deep_side_file, "environment.json is not readable JSON"),
    ],
)
def test_the_page_goes_on_and_names_what_it_left_out(tmp_path, monkeypatch, spoil, named):
    monkeypatch.setattr("safari.view.app.EVERY", 0.05)
    run = made(tmp_path / "run")
    with served([run]) as address, stream(address) as events:
        told = [next(events) for _ in range(3)]
        spoil(run)
        time.sleep(0.2)
        run.trial("safari", 0).append(record(2, top1=0.75), {})
        for kind, value in events:
            told.append((kind, value))
            if kind == "trials" and value.get("0/safari/0", {}).get("columns", {}).get("top1") == [0.75]:
                break
    if named:
        with served([run]) as address, stream(address) as events:
            told += [next(events) for _ in range(3)]
        assert any(named in json.dumps(value) for _, value in told)


@pytest.mark.parametrize(
    "odd",
    [
        {"since": datetime.date(1979, 5, 27)},
        {"since": datetime.datetime(1979, 5, 27, 7, 32)},
        {"list": nested(5000)},
    ],
)
def test_options_that_no_plug_in_of_ours_has_are_shown(tmp_path, odd):
    config = replace(parse(CONFIG), uplink=Plug("bernoulli", odd))
    run = made(tmp_path / "run")
    with served([RunFolder(run.path, config)]) as address, stream(address) as events:
        told = dict(next(events) for _ in range(3))
    (about,) = told["runs"]["runs"]
    assert told["trials"]["0/drop/0"]["columns"]["round"] == [1]
    if "since" in odd:
        assert dict(about["fields"])["uplink.since"].startswith("1979-05-27")
    named = [problem.split(" cannot be shown")[0] for problem in about["problems"]]
    assert named == ["the table of fields"] * ("list" in odd) + ["the text of the config"]


def test_names_that_no_file_could_hold_are_shown(tmp_path):
    """JSON can hold half of a character."""
    run = made(tmp_path / "run")
    layers = {"\ud800": 0.5, "\x1b[2J": 0.25}
    run.trial("drop", 0).rounds.write_text(json.dumps(record(1, layers=layers)) + "\n")
    with served([run]) as address, stream(address) as events:
        assert next(events)[0] == "runs"
        status, _, data = ask(address, "/api/detail?trial=0/drop/0")
    assert status == 200
    assert json.loads(data)["layers"] == list(layers)


def test_more_seeds_than_anyone_could_look_for(tmp_path):
    run = made(tmp_path / "run", parse({**CONFIG, "seeds": 100_000}))
    run.trial("drop", 99_999).append(record(1), {})
    run.trial("drop", 100_000).append(record(1), {})
    with served([run]) as address, stream(address) as events:
        told = dict(next(events) for _ in range(3))
        assert set(told["trials"]) == {"0/drop/0", "0/drop/99999", "0/safari/0"}
        assert told["runs"]["runs"][0]["state"] == "stopped"
        run.trial("drop", 7).append(record(1), {})
        _, news = next(event for event in events if event[0] == "trials")
        assert set(news) == {"0/drop/7"}


def test_more_clients_than_pixels(tmp_path):
    run = made(tmp_path / "run", parse({**CONFIG, "clients": 10**9}))
    monitor = Monitor([run])
    monitor.poll()
    assert monitor.describe()["runs"][0]["drawn_clients"] == 0
    assert (monitor.detail("0/drop/0")["clients"], monitor.detail("0/drop/0")["status"]["length"]) == (0, 0)
    news, _ = monitor.since({})
    assert (news["0/drop/0"]["columns"]["arrived"], news["0/drop/0"]["columns"]["stood_in"]) == ([2], [1])


def test_a_line_without_an_end_is_not_kept_in_memory(tmp_path, monkeypatch):
    from safari.view import follow

    monkeypatch.setattr(follow, "CHUNK", 1000)
    monkeypatch.setattr(follow, "LONGEST_LINE", 4000)
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(b'{"n": 1}\n' + b"x" * 10_500)
    follower = follow.LineFollower(path)
    found = []
    for _ in range(20):
        found += follower.read()
    assert found == [(1, {"n": 1})]
    with path.open("ab") as file:
        file.write(b"xx\n" + b'{"n": 3}\n')
    for _ in range(20):
        found += follower.read()
    assert found == [(1, {"n": 1}), (3, {"n": 3})]
    assert follower.skipped.problems == ["rounds.jsonl, line 2 was skipped: longer than 4000 bytes"]
    assert follower.generation == 0


# --- floods


@contextlib.contextmanager
def viewed(run, folder):
    """`safari view` with everything it writes to standard error in a file: its address, and the file."""
    path = folder / "stderr"
    with path.open("w") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "safari", "view", str(run.path), "--no-browser", "--port", "0"],
            env=environment(), stdout=subprocess.DEVNULL, stderr=errors,
        )  # fmt: skip
    try:
        until = time.monotonic() + 60
        while not (found := re.search(r"^page: (\S+)$", path.read_text(), re.MULTILINE)):
            assert time.monotonic() < until, path.read_text()
            time.sleep(0.05)
        yield found[1], path, child.pid
    finally:
        child.terminate()
        child.wait(20)


def half_open(address, text=b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "):
    place = urlsplit(address)
    connection = socket.create_connection((place.hostname, place.port), timeout=30)
    connection.sendall(text)
    return connection


def test_the_page_stays_reachable_under_1500_half_open_requests(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip(f"this process may open {hard} files, and the attack needs 2000")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    with viewed(made(tmp_path / "run"), tmp_path) as (address, errors, pid), contextlib.ExitStack() as open_:
        # What most systems allow a process.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (1024, hard))
        for _ in range(1500):
            open_.enter_context(contextlib.closing(half_open(address)))
        began = time.monotonic()
        assert ask(address)[0] == 200
        assert time.monotonic() - began < 10
        with stream(address) as events:
            assert next(events)[0] == "runs"
        assert len(errors.read_text().splitlines()) <= 5


def test_nonsense_is_answered_and_not_reported_line_by_line(tmp_path):
    said = []
    with served([made(tmp_path / "run")], report=said.append) as address:
        for k in range(50):
            with half_open(address, b"\x00 nonsense %d\r\n\r\n" % k) as connection:
                assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
        assert ask(address)[0] == 200
    assert len(said) <= 1


def answering(body, limits):
    """An application behind the limits whose answers have the body that `body` sends."""

    async def with_lifespan(scope, receive, send):
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await body(send)
        await send({"type": "http.response.body", "body": b""})

    return serving(with_lifespan, limits)


async def nothing(send):
    pass


def test_a_request_that_does_not_end_is_closed_in_time():
    with (
        answering(nothing, replace(DEFAULT_LIMITS, request_seconds=0.2)) as address,
        half_open(address) as one,
    ):
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b""
        assert ask(address)[0] == 200
        # The same after a first answer, on a connection that was kept open.
        with half_open(address, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") as again:
            assert again.recv(1000).startswith(b"HTTP/1.1 200")
            again.sendall(b"GET / HTT")
            with contextlib.suppress(ConnectionResetError):
                while again.recv(1000):
                    pass


def test_the_oldest_half_open_connection_gives_way():
    with answering(nothing, replace(DEFAULT_LIMITS, pending=3)) as address, contextlib.ExitStack() as stack:
        first, *others = [stack.enter_context(half_open(address)) for _ in range(4)]
        with contextlib.suppress(ConnectionResetError):
            assert first.recv(1) == b""
        for other in others:
            other.sendall(b"x\r\n\r\n")
            assert other.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_reader_that_stands_still_is_let_go():
    ended = threading.Event()

    async def much(send):
        for _ in range(256):
            await send({"type": "http.response.body", "body": b"x" * 2**18, "more_body": True})
        ended.set()

    with answering(much, replace(DEFAULT_LIMITS, send_seconds=0.3)) as address:
        with half_open(address, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
            assert ended.wait(20), "the answer still waits for room"
        assert ask(address)[0] == 200


def test_too_many_requests_at_once_are_turned_away():
    go, began = threading.Event(), threading.Semaphore(0)

    async def slow(send):
        began.release()
        while not go.is_set():
            await asyncio.sleep(0.01)

    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    with answering(slow, Limits(active=2)) as address, contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(half_open(address, request))
            assert began.acquire(timeout=10)
        assert ask(address)[0] == 503
        go.set()
        time.sleep(0.1)
        assert ask(address)[0] == 200


def test_errors_of_one_kind_are_reported_once_a_minute():
    said, now = [], [0.0]
    report = Reporter(said.append, clock=lambda: now[0])
    for second in range(130):
        now[0] = float(second)
        report("OSError", f"accept failed {second}")
    report("ValueError", "another")
    assert said == [
        f"{text} (reported at most once a minute)"
        for text in ("accept failed 0", "accept failed 60", "accept failed 120", "another")
    ]
