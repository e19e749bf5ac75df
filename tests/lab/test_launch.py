"""What the lab's processes are given: files that can be read back, whatever the folder is called."""

from __future__ import annotations

import os
import sys
import tomllib

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")
pytest.importorskip("raptorq", reason="needs the extra net: pip install 'safari-fl[net]'")

import importlib
from pathlib import Path

from safari.errors import SafariError
from safari.lab.app import config_of
from safari.lab.launch import Lab, _environment, supernode_arguments
from safari.net.certificates import make_certificates

flower_supernode = importlib.import_module("flwr.supernode.cli.flower_supernode")

NAMES = [
    'quo"te',
    "apo'strophe",
    "back\\slash",
    "back\\",
    "{config}",
    "tab\there",
    "line\nbreak",
    "del\x7f",
    "u\u00fc\U0001f43e",
    "# [x]",
]
SETTINGS = {"clients": 2, "rounds": 1, "client-rate": 1e6, "sparsity": 0.8, "seed": -1, "rule": "safari+"}


def tables(folder: Path) -> tuple[dict, dict]:
    files = folder / "flwr" / "config.toml", folder / "app" / "pyproject.toml"
    return tuple(tomllib.loads(path.read_text(encoding="utf-8")) for path in files)


def test_a_client_waits_for_its_server_without_end(tmp_path):
    """As Flower's own parser reads it: with an end, the SuperNode gives up, and its process stays for ever."""
    arguments = supernode_arguments("127.0.0.1:8000", tmp_path / "ca.crt", tmp_path / "key", 0, 2)
    read = flower_supernode._parse_args_run_supernode().parse_args([str(each) for each in arguments])
    assert read.max_wait_time is None
    assert read.superlink == "127.0.0.1:8000"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such names")
@pytest.mark.parametrize("name", NAMES)
def test_odd_names_of_folders_come_back_as_they_are(tmp_path, name):
    lab = Lab(tmp_path / name, "127.0.0.1", 8000, 8001, SETTINGS)
    lab.prepare()
    flower, app = tables(lab.folder)
    config = app["tool"]["flwr"]["app"]["config"]
    assert Path(flower["superlink"]["lab"]["root-certificates"]) == lab.certificates.authority
    assert flower["superlink"]["lab"]["address"] == f"127.0.0.1:{lab.control_port}"
    assert Path(config["run"]) == lab.run == tmp_path / name / "run"
    assert SETTINGS.items() <= config.items()


@pytest.mark.skipif(os.name != "posix", reason="modes are of POSIX")
@pytest.mark.parametrize("place", [".", "app", "flwr", "certificates"])
def test_a_folder_that_others_can_write_is_refused_before_a_secret_is_in_it(tmp_path, place):
    """What lies in the app's folder runs on every client."""
    lab = Lab(tmp_path / "lab", "127.0.0.1", 8000, 8001, SETTINGS)
    (lab.folder / place).mkdir(parents=True)
    (lab.folder / place).chmod(0o777)
    with pytest.raises(SafariError, match="others must not be able to write there"):
        lab.prepare()
    assert not [path for path in lab.folder.rglob("*") if path.is_file()]


def test_the_token_is_not_passed_on_to_apps(tmp_path, monkeypatch):
    monkeypatch.setenv("SAFARI_NET_TOKEN", "5d01")
    assert "5d01" not in _environment(tmp_path).values()


@pytest.mark.skipif(os.name != "posix", reason="modes are of POSIX")
def test_a_key_is_written_past_a_link_and_for_this_user_alone(tmp_path):
    other = tmp_path / "other"
    other.write_text("kept")
    other.chmod(0o644)
    (tmp_path / "server.key").symlink_to(other)
    files = make_certificates(tmp_path, ["127.0.0.1"])
    assert other.read_text() == "kept"
    assert [path.stat().st_mode & 0o777 for path in (files.key, files.server)] == [0o600, 0o644]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.crt", "other", "server.crt", "server.key"]


@pytest.mark.skipif(sys.platform != "linux", reason="names that are no text")
def test_a_name_that_is_not_text_is_reported(tmp_path):
    lab = Lab(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")), "127.0.0.1", 8000, 8001, SETTINGS)
    with pytest.raises(SafariError, match="the folder must have a name in UTF-8"):
        lab.prepare()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SafariError, match=r"cannot write into .*file"):
        Lab(tmp_path / "file" / "lab", "127.0.0.1", 8000, 8001, SETTINGS).prepare()


def test_each_client_has_a_command_of_its_own(tmp_path):
    lab = Lab(tmp_path, "192.0.2.1", 8000, 8001, SETTINGS)
    lab.prepare()
    file = lab.invitations.folder / "commands.txt"
    assert file.read_text().splitlines() == [lab.invitation(0), lab.invitation(1)]
    assert file.stat().st_mode & 0o777 == 0o600
    assert lab.invitation(0).startswith(
        "safari net join 192.0.2.1:8000 --client 0 --clients 2 --fingerprint "
    )


SETTINGS = {
    "seed": 0,
    "rounds": 3,
    "clients": 2,
    "rule": "drop",
    "model": "cnn",
    "sparsity": 0.8,
    "values": "",
}


def test_a_preset_lies_under_the_other_options():
    plain, best = config_of(SETTINGS), config_of(SETTINGS | {"preset": "best"})
    assert (plain.client.name, plain.local.optimiser, plain.wire.values) == ("fedavg", "adam", "auto")
    assert (best.client.name, best.local.optimiser, best.wire.values) == ("mime", "sgd", "step")
    assert (best.wire.ratio, best.aggregation.average, best.local.steps) == (80.0, 0.9, 5)
    assert [arm.name for arm in best.arms] == ["drop"]
    assert config_of(SETTINGS | {"preset": "best", "values": "int8"}).wire.values == "int8"
