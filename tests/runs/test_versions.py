"""A trial says which version of the code computed which of its rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import safari
from safari.runs import RunFolder
from safari.runs.versions import note_version, versions_of
from safari.version import code_version

TINY = {"rounds": 3, "arms": ["drop"], "clients": 5, "model": {"name": "mlp", "hidden": [4]},
        "local": {"steps": 1}, "checkpoint": {"every": 1}, "wire": {"every": 0}}  # fmt: skip


def pretend(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("safari.runs.versions.code_version", lambda: version)


def test_a_run_names_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safari.run(TINY, tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    trial = run.trial("drop", 0)
    assert versions_of(trial) == [code_version()]
    assert json.loads((run.path / "environment.json").read_text())["code"] == code_version()
    before = (trial.path / "code.json").read_bytes()
    pretend(monkeypatch, "another")
    safari.resume(run.path)
    assert (trial.path / "code.json").read_bytes() == before, "it had nothing to do"
    text = (run.path / "config.toml").read_text().replace("rounds = 3", "rounds = 5")
    (run.path / "config.toml").write_text(text)
    safari.resume(run.path)
    assert json.loads((trial.path / "code.json").read_text()) == [
        {"round": 1, "code": code_version()},
        {"round": 4, "code": "another"},
    ]
    assert versions_of(trial) == [code_version(), "another"]


def test_rounds_that_were_lost_are_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version whose rounds no checkpoint kept has computed nothing of the trial."""
    trial = RunFolder.create(tmp_path / "run", safari.parse(TINY)).trial("drop", 0)
    for version, first in (("a", 1), ("b", 3), ("a", 3), ("a", 5), ("c", 6)):
        pretend(monkeypatch, version)
        note_version(trial, first)
    assert versions_of(trial) == ["a", "c"]
    note_version(trial, 1)
    assert versions_of(trial) == ["c"]


@pytest.mark.parametrize("text", ["3", '[{"round": 1}]', '[["round"]]', '[{"round": 1e999, "code": "a"}]'])
def test_a_damaged_note_is_named(tmp_path: Path, text: str) -> None:
    trial = RunFolder.create(tmp_path / "run", safari.parse(TINY)).trial("drop", 0)
    (trial.path / "code.json").write_text(text)
    with pytest.raises(safari.SafariError, match=r"seed-0/code\.json does not say which code made which"):
        versions_of(trial)


def test_trials_from_before_name_none(tmp_path: Path) -> None:
    trial = RunFolder.create(tmp_path / "run", safari.parse(TINY)).trial("drop", 0)
    assert versions_of(trial) == []
