"""Damaged results of `safari reproduce`: read, told in words, never a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest

from attacks.damage import TEXTS, WRONG
from evidence.kit import write
from safari.cli import cli
from safari.errors import SafariError

ONE = """
title = "One"
claim = "words of the paper"
base = "base/tiny.toml"
show = []
set = { arms = ["drop"], seeds = 1, rounds = 2 }

[axes.pruner]
mag = { pruning.pruner = "mag" }
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """An experiment of one trial, finished: `experiments` and `out`."""
    place = tmp_path_factory.mktemp("done")
    write(place / "experiments", one=ONE)
    reproduce(place, "--no-report")
    (numbers,) = (place / "out").rglob("numbers.json")
    assert numbers.exists()
    return place


def reproduce(place: Path, *more: str) -> None:
    arguments = ["reproduce", "--from", place / "experiments", "--out", place / "out", "--quiet", *more]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        cli.main([str(a) for a in arguments], prog_name="safari", standalone_mode=False)


def damages(done: Path) -> list[tuple[str, str, bytes | None]]:
    """A file of the results, what is wrong with it, and its bytes; None: it is a link."""
    out = done / "out"
    files = {path.name: path for path in out.rglob("*") if path.is_file()}
    names = ["results.json", "numbers.json", "environment.json", "code.json", "config.toml"]
    found = [
        (str(files[name].relative_to(out)), what, data) for name in names for what, data in TEXTS.items()
    ]
    found += [(str(files[name].relative_to(out)), "a link", None) for name in names]
    for name in ("results.json", "numbers.json"):
        table = json.loads(files[name].read_text())
        for key in table:
            for number, value in enumerate(WRONG):
                data = json.dumps({**table, key: value}).encode()
                found.append((str(files[name].relative_to(out)), f"{key} wrong {number}", data))
    return found


def tracebacks(done: Path, tmp_path: Path, part: slice) -> list[str]:
    found = []
    for number, (name, what, data) in enumerate(damages(done)[part]):
        place = Path(shutil.copytree(done, tmp_path / str(number)))
        file = place / "out" / name
        if data is None:
            (place / "secret").write_bytes(file.read_bytes())
            file.unlink()
            file.symlink_to(place / "secret")
        else:
            file.write_bytes(data)
        for arguments in (["--list"], ["--report-only", "--no-report"]):
            try:
                reproduce(place, *arguments)
            except SafariError as error:
                found += [] if str(error) else [f"{name}: {what}: no words"]
            except Exception as error:
                found.append(f"{name}: {what}: {arguments[0]}: {type(error).__name__}: {str(error)[:100]}")
        shutil.rmtree(place)
    return found


@pytest.mark.parametrize("key", ["top1", "loss", "curve", "groups", "similarity", "code"])
def test_numbers_that_are_none_are_told_and_taken_in_by_nobody(done, tmp_path, key):
    """In the results of another machine, of which a page is to be made."""
    sound = json.loads((done / "out/results.json").read_text())
    refused = []
    for number, value in enumerate([*WRONG, "<b>", 10**400, {"round": [[]]}, [["x"]]]):
        table = json.loads(json.dumps(sound))
        (case,) = table["experiments"]["one"]["cases"].values()
        case["arms"]["drop"]["seeds"]["0"][key] = value
        other = tmp_path / f"other{number}"
        other.mkdir()
        (other / "results.json").write_text(json.dumps(table))
        place = tmp_path / f"{number}"
        shutil.copytree(done / "experiments", place / "experiments")
        try:
            reproduce(place, "--report-only", "--add", str(other))
        except SafariError as error:
            refused.append(str(error).replace(str(other), "OTHER"))
        assert len(refused) + len(list(tmp_path.glob("*/out"))) == number + 1, "refused, and yet taken in"
    assert len(refused) > 3
    assert all(text.startswith("OTHER/results.json does not hold results: seed 0: ") for text in refused)


def test_some_damages(done, tmp_path):
    assert tracebacks(done, tmp_path, slice(None, None, 7)) == []


@pytest.mark.slow
def test_every_damage(done, tmp_path):
    assert tracebacks(done, tmp_path, slice(None)) == []
