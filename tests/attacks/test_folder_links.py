"""A run's folder that somebody sent: links, devices and FIFOs in it lead nowhere."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import safari
from runs.kit import TINY
from safari.config import parse
from safari.errors import RunError, SafariError
from safari.report import MLflow, watchers_for
from safari.runs import RunFolder, Trial, files, read_checkpoint, read_lines, summarise

SECRET = b'{"name": "the neighbour\'s salary"}\n'
TRIAL = "trials/safari/seed-0"
LINES = ("rounds.jsonl", "timings.jsonl", "similarity.jsonl")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run of 7 rounds that stands at 6, the last of them without a checkpoint."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    safari.run({**TINY, "rounds": 6}, path)
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(text.replace("rounds = 6", "rounds = 7"))
    return path


@pytest.fixture
def run(stopped, tmp_path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


@pytest.fixture
def outside(tmp_path) -> Path:
    """What must not be read, emptied or added to."""
    place = tmp_path / "outside"
    place.mkdir()
    for name in ("secret", *LINES, "config.toml", "checkpoint.safetensors", "top1.png"):
        (place / name).write_bytes(SECRET)
    return place


def untouched(outside: Path) -> bool:
    return all(path.read_bytes() == SECRET for path in outside.iterdir())


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    make(path)


@pytest.mark.parametrize("name", LINES)
def test_resume_does_not_write_through_a_link(run, outside, name):
    replace(run / TRIAL / name, lambda path: path.symlink_to(outside / "secret"))
    with pytest.raises(RunError) as error:
        safari.resume(run)
    assert str(error.value) == (f"{run / TRIAL / name} is a symbolic link; only plain files are used")
    assert untouched(outside)


@pytest.mark.parametrize("name", LINES)
def test_resume_does_not_write_a_file_that_has_a_name_elsewhere(run, outside, name):
    own = (run / TRIAL / name).read_bytes()
    (outside / "secret").unlink()
    os.link(run / TRIAL / name, outside / "secret")
    with pytest.raises(RunError, match=rf"{name} has 2 names \(hard links\): writing it would"):
        safari.resume(run)
    assert (outside / "secret").read_bytes() == own


@pytest.mark.parametrize("part", ["trials", "trials/safari", TRIAL])
def test_folders_that_are_links_are_not_entered(run, outside, part):
    kept = outside.parent / "kept"
    shutil.move(run / part, kept)
    (run / part).symlink_to(kept)
    before = {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    for use in (safari.resume, lambda path: summarise(RunFolder.open(path))):
        with pytest.raises(RunError) as error:
            use(run)
        assert str(error.value) == (
            f"{run / part} is a symbolic link; only folders inside of a run's folder are used"
        )
    assert {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("part", ["trials", "trials/safari", TRIAL])
def test_nothing_is_made_behind_a_link(run, outside, part):
    shutil.rmtree(run / part)
    (run / part).symlink_to(outside)
    with pytest.raises(RunError, match="is a symbolic link; only folders"):
        safari.resume(run)
    assert untouched(outside)


def test_a_config_that_is_a_link_is_not_read(run, outside):
    replace(run / "config.toml", lambda path: path.symlink_to(outside / "config.toml"))
    with pytest.raises(RunError) as error:
        RunFolder.open(run)
    assert str(error.value) == (f"{run}/config.toml is a symbolic link; only plain files are used")


def test_a_checkpoint_that_is_a_link_is_not_read(run, outside):
    path = run / TRIAL / "checkpoint.safetensors"
    shutil.move(path, outside / "real")
    path.symlink_to(outside / "real")
    with pytest.raises(RunError, match=r"checkpoint.safetensors is a symbolic link; only plain files"):
        safari.resume(run)
    with pytest.raises(RunError, match=r"checkpoint.safetensors is a symbolic link; only plain files"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", [".writer", "summary.json", "clients.json", "report.html"])
def test_what_is_written_anew_replaces_a_link(run, outside, name):
    replace(run / name, lambda path: path.symlink_to(outside / "secret"))
    safari.resume(run)
    assert untouched(outside)


def test_a_lock_that_is_a_link_is_refused(run, outside):
    replace(run / ".lock", lambda path: path.symlink_to(outside / "secret"))
    with pytest.raises(RunError, match=r"\.lock is a symbolic link; only plain files"):
        safari.resume(run)
    assert untouched(outside)


def test_a_link_with_the_name_of_a_temporary_file_is_not_followed(tmp_path, outside, monkeypatch):
    monkeypatch.setattr("safari.runs.files.secrets.token_hex", lambda count: "0" * 2 * count)
    (tmp_path / f".summary.json.{os.getpid()}-00000000.tmp").symlink_to(outside / "secret")
    with pytest.raises(RunError, match=r"^cannot write .*summary.json: File exists"):
        files.write_atomically(tmp_path / "summary.json", b"{}")
    assert untouched(outside)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def deep(path: Path) -> None:
    path.write_text("[" * 100_000 + "]" * 100_000)


def zero(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [fifo, zero])
@pytest.mark.parametrize("name", ["config.toml", f"{TRIAL}/rounds.jsonl", f"{TRIAL}/checkpoint.safetensors"])
def test_devices_and_fifos_are_refused_at_once(run, make, name):
    """Reading one would wait for ever, or fill the memory."""
    replace(run / name, make)
    with pytest.raises(SafariError, match=r" is a (FIFO|device|symbolic link); only plain files"):
        safari.resume(run)


def test_a_file_that_is_read_whole_has_a_limit(run):
    with (run / "config.toml").open("r+b") as handle:
        handle.truncate(files.LARGEST_WHOLE + 1)
    with pytest.raises(RunError, match=r"config.toml is larger than the 67,108,864 bytes"):
        RunFolder.open(run)


def test_a_line_has_a_limit(run, monkeypatch):
    """A file of zeros is one line."""
    monkeypatch.setattr(files, "LONGEST_LINE", 2**16)
    rounds = run / TRIAL / "rounds.jsonl"
    with rounds.open("r+b") as handle:
        handle.truncate(2**40)
    with pytest.raises(RunError, match=r"rounds.jsonl, line 7 is longer than 65,536 bytes"):
        list(read_lines(rounds))


def test_resume_removes_only_its_own_temporary_files(run):
    theirs = [
        run / ".notes.tmp",
        run / ".paper.tex.1.tmp",
        run / TRIAL / ".rounds.jsonl.swp.tmp",
        run / "mine" / ".summary.json.999999999.tmp",
        run / ".summary.json.999999999-.tmp",
    ]
    ours = [
        run / ".summary.json.999999999.tmp",
        run / TRIAL / ".checkpoint.safetensors.999999999-0123abcd.tmp",
    ]
    (run / "mine").mkdir()
    for path in (*theirs, *ours):
        path.touch()
    # Another process that is alive (the first of the machine) writes a report just now.
    living = run / ".report.html.1-0123abcd.tmp"
    living.touch()
    (run / "linked").symlink_to(run.parent)
    safari.resume(run)
    assert [path.exists() for path in theirs] == [True] * len(theirs)
    assert [path.exists() for path in ours] == [False] * len(ours)
    assert living.exists()


def test_going_back_does_not_follow_links_either(run, outside):
    replace(run / TRIAL / "rounds.jsonl", lambda path: path.symlink_to(outside / "rounds.jsonl"))
    with pytest.raises(RunError, match="is a symbolic link"):
        safari.resume(run, from_round=3)
    assert untouched(outside)


def test_a_run_s_folder_itself_may_be_reached_by_a_link(run, tmp_path):
    """The user asked for that."""
    (tmp_path / "latest").symlink_to(run)
    assert safari.resume(tmp_path / "latest")["arms"]["safari"]["seeds"]["0"]["finished"]


def test_a_run_sent_as_an_archive_of_links_does_nothing(run, outside, tmp_path):
    """The whole way: packed by one, unpacked and resumed by another."""
    for path in [*run.rglob("*.jsonl"), *run.rglob("*.json")]:
        replace(path, lambda path: path.symlink_to(outside / "secret"))
    with tarfile.open(tmp_path / "sent.tar", "w") as archive:
        archive.add(run, "sent")
    with tarfile.open(tmp_path / "sent.tar") as archive:
        archive.extractall(tmp_path / "received", filter="fully_trusted")
    with pytest.raises(RunError, match="is a symbolic link; only plain files"):
        safari.resume(tmp_path / "received" / "sent")
    trial = Trial("safari", 0, tmp_path / "received/sent" / TRIAL)
    with pytest.raises(RunError, match="is a symbolic link; only plain files"):
        trial.records()
    assert untouched(outside)


@pytest.fixture
def tracked(tmp_path) -> Path:
    """A finished run whose config asks for TensorBoard's files, as somebody may send one."""
    pytest.importorskip("tensorboard")
    path = tmp_path / "tracked"
    config = parse({**TINY, "track": {"tensorboard": True}})
    safari.run(config, path, watchers_for(config), progress=False)
    return path


def log_again(run: Path) -> None:
    """What `safari resume` does of a finished run: trackers get what they may have missed."""
    safari.resume(run, watchers_for(RunFolder.open(run).config))


@pytest.mark.parametrize("part", ["tensorboard", "tensorboard/safari", "tensorboard/safari/seed-0"])
def test_no_events_are_written_behind_a_link(tracked, outside, part):
    shutil.rmtree(tracked / part)
    (tracked / part).symlink_to(outside)
    with pytest.raises(RunError, match="is a symbolic link; only folders inside of a run's folder are used"):
        log_again(tracked)
    assert untouched(outside)


def test_events_are_read_from_plain_files_only(tracked, outside):
    (tracked / "tensorboard/safari/seed-0/events.out.tfevents.1").symlink_to(outside / "secret")
    with pytest.raises(RunError, match=r"events\.out\.tfevents\.1 is a symbolic link; only plain files"):
        log_again(tracked)


def test_events_that_are_none_are_an_error_in_words(tracked):
    (events,) = (tracked / "tensorboard/safari/seed-0").iterdir()
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    # A record whose checksums are right, and which is no event.
    length, data = struct.pack("<Q", 50), b"\xff" * 50
    sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
    events.write_bytes(length + sums[0] + data + sums[1])
    with pytest.raises(RunError, match="holds no events that TensorBoard can read; remove it"):
        log_again(tracked)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to(path.parent / "ids"), os.mkfifo, deep])
def test_ids_of_mlflow_are_read_from_a_plain_file_only(stopped, tmp_path, make):
    pytest.importorskip("mlflow")
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    (run / "ids").write_text('{"uri": "http://localhost:1", "runs": {}}')
    make(run / "mlflow.json")
    tracker = MLflow("http://localhost:1")
    tracker._run = RunFolder.open(run)
    with pytest.raises(RunError, match=r"ids; remove it.* is (a symbolic link|a FIFO|not readable JSON)"):
        tracker._read_ids()
