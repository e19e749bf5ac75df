"""`safari.run` and `safari.resume` from Python: progress, notes, the page, and errors in neutral words."""

from __future__ import annotations

import json

import pytest

import safari
from runs.kit import TINY
from safari.errors import DataError, RunError
from safari.runs import RunFolder

EVERY = {**TINY, "evaluation": {"every": 1, "last": 4}}


def test_a_run_tells_how_it_goes_and_leaves_a_page(tmp_path, capsys):
    summary = safari.run(EVERY, tmp_path / "run")
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert lines[0] == f"run folder: {tmp_path / 'run'}"
    assert lines[1].startswith("drop  seed 0  round 1/7  top-1 ")
    assert len([line for line in lines if line.startswith("safari  seed 0  round ")]) == 7
    assert (tmp_path / "run/report.html").read_text().startswith("<!doctype html>")
    assert summary == json.loads((tmp_path / "run/summary.json").read_text())


def test_it_can_be_quiet_and_without_a_page(tmp_path, capsys):
    safari.run(TINY, tmp_path / "run", progress=False, report=False)
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "run/report.html").exists()
    safari.resume(tmp_path / "run", progress=False, report=False)
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "run/report.html").exists()


def test_notes_reach_the_watchers(tmp_path, capsys):
    wild = {**TINY["local"], "lr": 1e30}
    safari.run({**TINY, "local": wild, "uplink": {"name": "perfect"}}, tmp_path / "run")
    assert "updates were refused (client 0: " in capsys.readouterr().err


def test_a_folder_has_a_name_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    safari.run(TINY, progress=False)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("tiny-20")


@pytest.mark.parametrize("done", [3, 6])
def test_a_resumed_run_says_where_it_goes_on(tmp_path, capsys, done):
    safari.run({**EVERY, "rounds": done}, tmp_path / "run", progress=False)
    text = (tmp_path / "run/config.toml").read_text()
    (tmp_path / "run/config.toml").write_text(text.replace(f"rounds = {done}", "rounds = 7"))
    safari.resume(tmp_path / "run")
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == f"going on after round {done}"
    rounds = [line.split("round ")[1].split("/")[0] for line in lines if line.startswith("safari  seed 0")]
    assert rounds == [str(number) for number in range(done + 1, 8)], "old rounds are not told as new ones"


def test_a_finished_run_goes_on_nowhere(tmp_path, capsys):
    safari.run(EVERY, tmp_path / "run", progress=False)
    safari.resume(tmp_path / "run")
    first, *others = capsys.readouterr().err.splitlines()
    assert first == f"run folder: {tmp_path / 'run'}"
    assert all(line.startswith("warning: ") for line in others)


def test_overwrite_replaces_a_run_and_nothing_else(tmp_path):
    safari.run(TINY, tmp_path / "run", progress=False)
    with pytest.raises(RunError) as error:
        safari.run({**TINY, "rounds": 2}, tmp_path / "run", progress=False)
    assert str(error.value) == (
        f"{tmp_path / 'run'} holds a run already: resume it, overwrite it, or choose another folder"
    )
    (tmp_path / "run/thesis.tex").write_text("mine")
    with pytest.raises(RunError, match=r"run holds more than a run: thesis.tex; nothing was removed"):
        safari.run({**TINY, "rounds": 2}, tmp_path / "run", overwrite=True, progress=False)
    assert len(RunFolder.open(tmp_path / "run").trial("drop", 0).records()) == 7
    (tmp_path / "run/thesis.tex").unlink()
    safari.run({**TINY, "rounds": 2, "arms": ["perfect"]}, tmp_path / "run", overwrite=True, progress=False)
    assert [path.name for path in (tmp_path / "run/trials").iterdir()] == ["perfect"]
    # A new folder, or an empty one, is no obstacle.
    safari.run({**TINY, "rounds": 2}, tmp_path / "new", overwrite=True, progress=False)


def test_overwrite_does_not_follow_links_and_waits_for_no_one(tmp_path):
    safari.run(TINY, tmp_path / "run", progress=False)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/kept").touch()
    (tmp_path / "run/figures").symlink_to(tmp_path / "outside")
    safari.run({**TINY, "rounds": 2}, tmp_path / "run", overwrite=True, progress=False)
    assert (tmp_path / "outside/kept").exists()
    with (
        RunFolder.open(tmp_path / "run").writing(),
        pytest.raises(RunError, match="is being written by another process"),
    ):
        safari.run({**TINY, "rounds": 2}, tmp_path / "run", overwrite=True, progress=False)
    assert (tmp_path / "run/config.toml").exists()


def test_a_wrong_config_overwrites_nothing(tmp_path):
    safari.run(TINY, tmp_path / "run", progress=False)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(safari.SafariError):
        safari.run({**TINY, "model": {"name": "gone"}}, tmp_path / "run", overwrite=True, progress=False)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_errors_have_no_words_of_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    with pytest.raises(DataError) as missing:
        safari.run({"data": {"name": "cifar10"}}, "run")
    with pytest.raises(RunError) as full:
        safari.run(TINY, "full")
    for error in (missing, full):
        assert "--" not in str(error.value)
        assert "safari " not in str(error.value)
