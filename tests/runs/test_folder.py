"""The rules of a run's folder: what may be created, opened, resumed, and who may write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runs.kit import RESUME, TINY, environment, python
from safari.config import parse
from safari.errors import ConfigError, RunError
from safari.runs import RoundRecord, RunFolder, Saved, Trial, read_lines, seeds_of
from safari.runs.files import temporaries
from safari.toml import read_toml

CONFIG = parse(TINY)


def test_a_new_folder_holds_the_complete_config(tmp_path):
    run = RunFolder.create(tmp_path / "deep" / "run", CONFIG)
    assert [path.name for path in run.path.iterdir()] == ["config.toml"]
    table = read_toml(run.path / "config.toml")
    assert parse(table) == CONFIG
    assert table["local"]["lr"] == 0.001, "fields that nobody set are written too"
    assert RunFolder.open(run.path) == run


def test_what_a_killed_process_leaves_is_no_run(tmp_path):
    for name in (".lock", ".writer", ".config.toml.17.tmp"):
        (tmp_path / name).touch()
    assert RunFolder.create(tmp_path, parse({})).config == parse({})


def test_an_empty_folder_is_fine(tmp_path):
    assert RunFolder.create(tmp_path, CONFIG).path == tmp_path


def test_a_second_run_in_one_folder_is_refused(tmp_path):
    RunFolder.create(tmp_path / "run", CONFIG)
    before = (tmp_path / "run" / "config.toml").read_bytes()
    with pytest.raises(RunError) as error:
        RunFolder.create(tmp_path / "run", parse({**TINY, "rounds": 99}))
    assert str(error.value) == (
        f"{tmp_path}/run holds a run already: resume it, overwrite it, or choose another folder"
    )
    assert (tmp_path / "run" / "config.toml").read_bytes() == before


def test_a_folder_with_something_else_in_it_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunError, match=r"is not an empty folder; choose another one$"):
        RunFolder.create(tmp_path, CONFIG)
    with pytest.raises(RunError, match=r"thesis.tex is not an empty folder; choose another one$"):
        RunFolder.create(tmp_path / "thesis.tex", CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_under_a_file_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"^cannot write .*file/run: Not a directory"):
        RunFolder.create(tmp_path / "file" / "run", CONFIG)


def test_a_config_that_toml_cannot_hold_makes_no_folder(tmp_path):
    config = parse({**TINY, "model": {"name": "mlp", "hidden": object()}})
    with pytest.raises(ConfigError, match="a config can hold texts, numbers, booleans, lists and tables"):
        RunFolder.create(tmp_path / "run", config)
    assert not (tmp_path / "run").exists()


def test_opening_what_is_no_run(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunError) as error:
            RunFolder.open(path)
        assert str(error.value) == f"{path} is not a run's folder: it has no config.toml"


def test_opening_a_run_whose_config_was_spoilt_names_the_file_in_every_line(tmp_path):
    (tmp_path / "config.toml").write_text("ronuds = 3\nclients = 0\n")
    with pytest.raises(ConfigError) as error:
        RunFolder.open(tmp_path)
    assert error.value.problems == [
        f"{tmp_path}/config.toml: ronuds is not a field (did you mean 'rounds'?)",
        f"{tmp_path}/config.toml: clients must be at least 1, got 0",
    ]
    (tmp_path / "config.toml").write_bytes(b"rounds = \xff")
    with pytest.raises(ConfigError, match=r"config.toml is not valid TOML"):
        RunFolder.open(tmp_path)


def test_trials_are_those_that_have_begun_by_arm_and_seed(tmp_path):
    run = RunFolder.create(tmp_path / "run", parse({**TINY, "seed": 5, "seeds": 3}))
    assert list(seeds_of(run.config)) == [5, 6, 7]
    assert run.trials() == []
    for arm, seed in (("safari", 6), ("drop", 7), ("drop", 5), ("drop", 99)):
        run.trial(arm, seed).append({"round": 1}, {})
    assert [(t.arm, t.seed) for t in run.trials()] == [("drop", 5), ("drop", 7), ("safari", 6)]


def test_records_come_back_as_they_went_in(tmp_path):
    trial = RunFolder.create(tmp_path / "run", CONFIG).trial("drop", 0)
    assert trial.records() == []
    records = [
        RoundRecord(1, (0,), (3,), {"loss": None, "top1": 0.1 + 0.2, "top5": 1}, refused={3: "too “odd”"}),
        RoundRecord(2, (), (0,), dict.fromkeys(("loss", "top1", "top5")), bytes={"up": None, "down": 7.5}),
    ]
    for record in records:
        trial.append(record, {"train": 0.5})
    assert [record.to_json() for record in trial.records()] == [
        record.to_json() | {"bytes": {"up": None, "down": None, **record.bytes}} for record in records
    ]
    timings = list(read_lines(trial.timings))
    assert [{**line, "time": line["time"][-1]} for line in timings] == [
        {"round": number, "time": "Z", "train": 0.5} for number in (1, 2)
    ]


def test_a_record_with_nan_in_it_is_never_written(tmp_path):
    trial = RunFolder.create(tmp_path / "run", CONFIG).trial("drop", 0)
    with pytest.raises(ValueError, match="Out of range float values"):
        trial.append({"round": 1, "loss": float("nan")}, {})
    assert trial.records() == []


HOLD = """
import sys
from pathlib import Path
from safari.runs import RunFolder
with RunFolder.open(Path(sys.argv[1])).writing():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A run that a real second process is writing."""
    run = RunFolder.create(tmp_path / "run", CONFIG)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout.readline() == b"held\n"
    yield run, process
    process.kill()
    process.communicate()


def test_the_second_writer_learns_who_is_first_and_kill_9_frees_the_folder(holder):
    run, process = holder
    told = f"{run.path} is being written by another process (pid {process.pid})"
    with pytest.raises(RunError) as error, run.writing():
        pass
    assert str(error.value) == told
    asked = python("-c", RESUME, str(run.path))
    assert asked.returncode == 1
    assert asked.stderr.rstrip().endswith(f"RunError: {told}")
    assert not (run.path / "trials").exists(), "the second writer wrote"

    process.send_signal(signal.SIGKILL)
    process.wait()
    with run.writing():
        assert (run.path / ".writer").read_text() == f"{os.getpid()}\n"


def test_one_process_cannot_write_a_folder_twice_either(tmp_path):
    run = RunFolder.create(tmp_path / "run", CONFIG)
    with run.writing():
        with pytest.raises(RunError, match=f"another process \\(pid {os.getpid()}\\)"), run.writing():
            pass
        assert (run.path / ".writer").exists()
    with run.writing():
        pass


def test_the_folder_is_free_again_after_an_error(tmp_path):
    run = RunFolder.create(tmp_path / "run", CONFIG)
    with pytest.raises(KeyboardInterrupt), run.writing():
        raise KeyboardInterrupt
    assert not (run.path / ".writer").exists()
    with run.writing():
        pass


def test_reading_needs_no_lock(holder):
    run, _ = holder
    run.trial("drop", 0).append({"round": 1}, {})
    (trial,) = RunFolder.open(run.path).trials()
    assert list(read_lines(trial.rounds)) == [{"round": 1}]


def test_what_a_killed_writer_left_half_written_is_swept_up(tmp_path):
    run = RunFolder.create(tmp_path / "run", CONFIG)
    trial: Trial = run.trial("drop", 0)
    for path in (
        run.path / ".summary.json.999999999.tmp",
        trial.path / ".checkpoint.safetensors.999999999.tmp",
        trial.path / ".best.safetensors.999999999-0123abcd.tmp",
    ):
        path.write_bytes(b"half")
    with run.writing():
        trial.append({"round": 1}, {})
        trial.save(Saved(1, {}, {}))
    assert sorted(p.name for p in run.path.rglob("*") if p.is_file()) == [
        ".lock",
        "checkpoint.safetensors",
        "config.toml",
        "rounds.jsonl",
        "timings.jsonl",
    ]


def test_a_run_killed_before_its_config_was_there_can_be_begun_again(tmp_path):
    (tmp_path / ".config.toml.1234.tmp").write_bytes(b"rou")
    assert RunFolder.create(Path(tmp_path), CONFIG).config == CONFIG


def test_a_file_that_another_process_has_finished_meanwhile_is_no_leftover(tmp_path, monkeypatch):
    (tmp_path / ".results.json.4000000-abcdef01.tmp").touch()
    listed = list(tmp_path.iterdir())
    listed[0].unlink()
    monkeypatch.setattr(type(tmp_path), "iterdir", lambda self: iter(listed if self == tmp_path else []))
    assert temporaries(tmp_path, abandoned=True) == []
