"""`safari net`: mistakes are reported before any process starts. The rest: tests/net/test_namespaces.py."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

from click.testing import CliRunner

from processes import free_port
from safari.cli import cli
from safari.cli.net import _line
from safari.net.certificates import make_certificates


def told(*arguments: object) -> tuple[int, str]:
    found = CliRunner().invoke(cli, ["net", *map(str, arguments)])
    return found.exit_code, found.output + (str(found.exception) if found.exception else "")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["serve", "--rule", "safarii"], "did you mean 'safari'?"),
        (["serve", "--model", "nothing"], "model.name must be one of"),
        (["serve", "--clients", 1], "1 is not in the range 2<=x<=1000"),
        (["serve", "--port", 0], "0 is not in the range 1<=x<=65535"),
        (
            ["join", "nowhere", "--client", 0, "--clients", 2, "--fingerprint", "00", "--token", "0"],
            "server must be host:port",
        ),
        (["join", "h:1", "--client", 0, "--clients", 2], "Missing option '--token'"),
        (
            ["join", "h:1", "--client", 2, "--clients", 2, "--token", "0"],
            "--client must lie between 0 and 1, got 2",
        ),
        (
            ["join", "h:1", "--client", 0, "--clients", 2, "--token", "0"],
            "known by one of --fingerprint and --certificate",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_words(tmp_path, monkeypatch, arguments, problem):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    code, output = told(*arguments)
    assert code != 0
    assert problem in output
    assert list(tmp_path.iterdir()) == []


def test_a_gate_with_files_that_do_not_fit_is_refused_in_words(tmp_path):
    one, other = (make_certificates(tmp_path / name, ["127.0.0.1"]) for name in "ab")
    files = {"authority": one.authority, "certificate": one.server, "key": one.key}

    def gate(**change: object) -> tuple[int, str]:
        return told(
            "gate",
            "--port",
            1,
            *(word for name, path in (files | change).items() for word in (f"--{name}", path)),
        )

    for change, problem in [
        ({"superlink": "nowhere"}, "--superlink must be host:port, got 'nowhere'"),
        ({"authority": one.key}, "server.key must be a certificate"),
        ({"host": "192.0.2.1"}, "cannot serve on 192.0.2.1, port 1"),
        ({"key": other.key, "host": "127.0.0.1", "port": free_port()}, "must be a certificate, and"),
    ]:
        code, output = gate(**change)
        assert code != 0
        assert problem in output


def test_an_unreachable_server_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    code, output = told(
        "join", "127.0.0.1:1", "--client", 0, "--clients", 2, "--fingerprint", "00", "--token", "0"
    )
    assert code != 0
    assert "no certificate can be had from 127.0.0.1:1" in output


def test_a_round_in_one_line():
    record = {
        "round": 7, "top1": 0.5, "blocks": {"0": {"packets": 3, "of": 4}, "1": {"packets": 0, "of": 0}},
    }  # fmt: skip
    assert (
        _line(record, 20)
        == "round    7 of 20   top-1  50.0 %   packets received: client 0: 3/4, client 1: 0/?"
    )
