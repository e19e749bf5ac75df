"""The server: who is let in, what is served, what is reported; with real sockets."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import sys
import threading
from contextlib import contextmanager
from urllib.parse import urlsplit

import numpy as np
import pytest

from safari.errors import MissingExtraError, SafariError
from safari.runs import RunFolder
from safari.view.arrays import decode_array
from safari.view.limits import DEFAULT_LIMITS
from safari.view.monitor import Monitor
from safari.view.page import FILES, HEADERS
from safari.view.server import PageServer, build, is_loopback, listen
from view.conftest import process, records, viewing

pytest.importorskip("uvicorn", reason="the extra 'view' is not installed")


@contextmanager
def serving(app, limits=DEFAULT_LIMITS, report=print):
    """Any ASGI application on a port of its own."""
    where, opened = listen("127.0.0.1", 0), threading.Event()
    server = PageServer(app, where, limits, report)
    thread = threading.Thread(target=lambda: asyncio.run(server.run(opened.set)), daemon=True)
    thread.start()
    assert opened.wait(20)
    try:
        yield f"http://127.0.0.1:{where.getsockname()[1]}/"
    finally:
        server.stop()
        thread.join(20)
        where.close()


def served(runs, token=None, hosts=frozenset({"127.0.0.1"}), rules=None, limits=DEFAULT_LIMITS, report=print):
    """The application of the page on a port of its own."""
    return serving(build(Monitor(runs, rules), token, hosts), limits, report)


def ask(address, path="/", headers=None):
    """An answer, redirects not followed."""
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
    try:
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


@contextmanager
def stream(address):
    """The events, one (kind, value) after the other."""
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
    connection.request("GET", "/api/events")
    answer = connection.getresponse()
    assert answer.headers["content-type"].startswith("text/event-stream")

    def events():
        kind = ""
        while line := answer.readline().decode():
            if line.startswith("event: "):
                kind = line[7:].strip()
            elif line.startswith("data: "):
                yield kind, json.loads(line[6:])

    try:
        yield events()
    finally:
        connection.close()


def test_the_page_and_its_files_are_served_with_a_strict_policy(address):
    status, headers, page = ask(address)
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.startswith(b"<!doctype html>")
    for name, kind in FILES.items():
        status, headers, text = ask(address, f"/static/{name}")
        assert (status, headers["content-type"]) == (200, kind)
        assert text
        assert {k: headers[k.lower()] for k in HEADERS} == HEADERS
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_only_these_files_are_served(address, small):
    snapshot = "/api/similarity?trial=0/safari/0&round="
    for path in (
        "/static/../server.py", "/static/%2e%2e%2fserver.py", "/static/..%2f..%2fconfig.py", "/config.toml",
        "/static/index.html", f"/static/{small.path}/config.toml", "/static/", "/api/detail?trial=../../x",
        "/api/detail", f"{snapshot}999", f"{snapshot}-1", f"{snapshot}%D9%A3", "/docs", "/openapi.json",
    ):  # fmt: skip
        status, _, body = ask(address, path)
        assert status == 404, path
        assert b"rounds" not in body


def test_writing_is_not_possible(address):
    place = urlsplit(address)
    for method in ("POST", "PUT", "DELETE"):
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
        connection.request(method, "/api/detail")
        assert connection.getresponse().status == 405
        connection.close()


def test_other_names_for_this_machine_are_refused(address):
    status, _, body = ask(address, headers={"Host": "evil.example"})
    assert (status, body) == (403, b"this page answers to its own address only\n")
    assert ask(address, "/api/events", headers={"Host": "evil.example:80"})[0] == 403


def test_a_token_is_asked_for_and_taken_out_of_the_address(small):
    with served([small], token="s3cret", hosts=None) as address:
        for path in ("/", "/static/main.js", "/api/events", "/api/detail?trial=0/safari/0", "/?token=s3cre"):
            status, headers, body = ask(address, path)
            assert status == 403
            assert body == b"a token is needed: use the address that safari view printed\n"
            assert "content-security-policy" in headers
        status, headers, _ = ask(address, "/?token=s3cret")
        assert (status, headers["location"]) == (303, "/")
        cookie = headers["set-cookie"]
        assert {"httponly", "samesite=strict"} <= {part.strip().lower() for part in cookie.split(";")}
        status, _, _ = ask(address, "/", headers={"Cookie": cookie.split(";")[0]})
        assert status == 200
        assert ask(address, "/", headers={"Cookie": "safari-view=wrong", "Host": "any.example"})[0] == 403


def test_the_first_events_tell_everything(address, small):
    with stream(address) as events:
        told = dict(next(events) for _ in range(3))
    (run,) = told["runs"]["runs"]
    assert (run["name"], run["state"], run["clients"]) == ("small", "finished", 6)
    assert run["seeds"] == {"first": 0, "count": 2}
    assert run["numbers"] == 64 * 8 + 8 + 8 * 10 + 10
    assert set(told["trials"]) == {f"0/{arm}/{seed}" for arm in ("drop", "safari") for seed in (0, 1)}
    trial = told["trials"]["0/safari/1"]
    assert trial["columns"]["top1"] == [r["top1"] for r in records(small, "safari", 1)]
    assert trial["detail"] is None, "details are for those who ask"
    assert told["table"]["header"][:2] == ["arm", "top-1 %"]


def test_details_are_those_of_the_records(address, small):
    detail = json.loads(ask(address, "/api/detail?trial=0/safari/0")[2])
    lines = records(small, "safari")
    whom = decode_array(detail["stand_in"]).reshape(40, 6)
    status = decode_array(detail["status"]).reshape(40, 6)
    for t, line in enumerate(lines):
        assert np.flatnonzero(status[t] == 1).tolist() == line["arrived"]
        expected = {int(j): who[0] + 1 for j, who in line["stand_ins"].items()}
        assert {j: int(whom[t, j]) for j in np.flatnonzero(whom[t])} == expected
    support = decode_array(detail["layer_density"]).reshape(40, 2)
    assert support[7] == pytest.approx(list(lines[7]["layers"].values()))


def test_a_snapshot_is_the_one_that_was_written(address, small):
    from safari.runs import read_lines
    from safari.runs.similarity import from_line

    lines = list(read_lines(small.trial("safari", 0).similarity))
    found = json.loads(ask(address, f"/api/similarity?trial=0/safari/0&round={lines[5]['round']}")[2])
    assert decode_array(found["matrix"]).tobytes() == from_line(lines[5]).tobytes()


def test_news_are_increments(copy):
    trial = copy.trial("safari", 0)
    lines = trial.rounds.read_bytes().splitlines(keepends=True)
    trial.rounds.write_bytes(b"".join(lines[:10]))
    with served([copy]) as address, stream(address) as events:
        told = dict(next(events) for _ in range(3))
        assert told["runs"]["runs"][0]["state"] == "stopped"
        assert len(told["trials"]["0/safari/0"]["columns"]["round"]) == 10
        with trial.rounds.open("ab") as file:
            file.write(lines[10] + lines[11] + lines[12][:20])
            file.flush()
            _, news = next(event for event in events if event[0] == "trials")
            assert list(news) == ["0/safari/0"]
            assert (news["0/safari/0"]["from"], news["0/safari/0"]["columns"]["round"]) == (10, [11, 12])
            assert news["0/safari/0"]["detail"]["length"] == 2
            file.write(lines[12][20:])
        _, news = next(event for event in events if event[0] == "trials")
        assert news["0/safari/0"]["columns"]["round"] == [13]


def test_view_serves_what_it_was_given_and_ends_when_stopped(small, tmp_path):
    with viewing(small.path) as address:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        assert ask(address)[0] == 200
    with pytest.raises(ConnectionRefusedError):
        ask(address)


def test_beyond_this_machine_there_is_a_token(small):
    with viewing(small.path, options=("--host", "0.0.0.0")) as address:
        place = urlsplit(address)
        assert re.fullmatch(r"token=[\w-]{32}", place.query)
        here = address.replace("0.0.0.0", "127.0.0.1")
        assert ask(here, "/")[0] == 403
        assert ask(here, f"/?{place.query}")[0] == 303


def test_errors_are_one_line(tmp_path, small):
    with process("view", str(tmp_path)) as child:
        assert child.stderr.read() == f"error: {tmp_path} is not a run's folder: it has no config.toml\n"
        assert child.wait(30) == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            SafariError, match=f"^cannot serve on 127.0.0.1, port {port}: Address already in use$"
        ):
            listen("127.0.0.1", port)


def test_the_usual_port_gives_way():
    with listen("127.0.0.1", None) as one, listen("127.0.0.1", None) as other:
        assert one.getsockname()[1] != other.getsockname()[1]


def test_without_the_extra_it_says_which(small, monkeypatch):
    monkeypatch.delitem(sys.modules, "safari.view.app", raising=False)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(MissingExtraError) as error:
        build(Monitor([small]))
    assert str(error.value) == "live pages need starlette and uvicorn: pip install 'safari-fl[view]'"


def test_what_counts_as_this_machine():
    assert [is_loopback(h) for h in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(h) for h in ("0.0.0.0", "::", "192.168.0.2", "example.org")] == [False] * 4


def test_the_newest_run_is_watched_when_none_is_named(tmp_path, small, monkeypatch):
    import os

    from safari.cli.view import _newest

    for k, name in enumerate(["a", "b", "c"]):
        run = RunFolder.create(tmp_path / name, small.config)
        os.utime(run.path / "config.toml", (100 - (k == 1), 100 - (k == 0) * 9))
    assert _newest(tmp_path).name == "c", "of the same time, the last by name"
