"""Damaged results of `safari reproduce` are read or reported in words, never with a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attacks.damage import TEXTS, WRONG
from claims import write
from safari.cli import cli
from safari.errors import SafariError
from safari.sweep.numbers import COLUMNS, limits_of

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
def test_invalid_numbers_are_reported_and_used_nowhere(done, tmp_path, key):
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


HALF = "\ud800"
# Where in the numbers of a seed, what stands there, and what is said of it.
STRANGE: dict[str, tuple[str, Any, str]] = {
    "half a character": ("code", [HALF], "code must be a text that UTF-8 can hold, got '\\ud800'"),
    "a huge score": ("top1", 1.7e308, "top1 must be null or a number from -1e+40 to 1e+40, got 1.7e+308"),
    "a share below 0": ("lost_updates", -0.5, "lost_updates must be null or a number from 0 to 1, got -0.5"),
    "a huge loss": ("loss", 1e41, "loss must be null or a number from -1e+40 to 1e+40, got 1e+41"),
    "less than no bytes": ("bytes_up", -1, "bytes_up must be null or a number from 0 to 1e+40, got -1"),
    "no rounds": ("curve", {"top1": [0.5]}, "curve must have round, the list of its rounds, got top1"),
    "no rounds of groups": (
        "groups", {"share": [1]}, "groups must have round, the list of its rounds, got share",
    ),
    "no rounds of errors": (
        "diagnosis", {}, "diagnosis must have round, the list of its rounds, got nothing",
    ),
    "no curve": ("curve", None, "curve must be a table of lists of numbers"),
    "a round of null": (
        "curve", {"round": [None], "top1": [0.5]}, "curve.round must be a number from 0 to 1e+09, got None",
    ),
    "a round in words": (
        "groups", {"round": ["1"], "share": [0.5]}, "groups.round must be a number from 0 to 1e+09, got '1'",
    ),
    "a round in a list": (
        "diagnosis", {"round": [[1]]}, "diagnosis.round must be a number from 0 to 1e+09, got a list",
    ),
    "a huge score of a curve": (
        "curve", {"round": [1], "top1": [1e41]},
        "curve.top1 must be null or a number from -1e+40 to 1e+40, got 1e+41",
    ),
    "too alike": (
        "similarity", [[1e308]], "similarity must be null or a number from -1e+40 to 1e+40, got 1e+308",
    ),
}  # fmt: skip


def refused(place: Path, *more: str) -> str:
    """What is said of a folder that no page can be made of."""
    with pytest.raises(SafariError) as caught:
        reproduce(place, *more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(done: Path, place: Path, change: Callable[[dict[str, Any]], None]) -> tuple[Path, bytes]:
    """A copy of the finished experiment with other results; its results.json, and what it holds."""
    shutil.copytree(done, place)
    path = place / "out/results.json"
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))
    return path, path.read_bytes()


def arm_of(table: dict[str, Any]) -> dict[str, Any]:
    (case,) = table["experiments"]["one"]["cases"].values()
    return case["arms"]["drop"]


@pytest.mark.parametrize(("key", "value", "told"), STRANGE.values(), ids=STRANGE)
def test_what_no_page_can_be_made_of_is_refused_wherever_it_comes_from(done, tmp_path, key, value, told):
    def change(table: dict[str, Any]) -> None:
        arm_of(table)["seeds"]["0"][key] = value

    path, before = changed(done, tmp_path / "own", change)
    said = f"{path} does not hold results: seed 0: {told}"
    assert refused(tmp_path / "own", "--report-only") == said
    assert path.read_bytes() == before
    shutil.copytree(done / "experiments", tmp_path / "other/experiments")
    assert refused(tmp_path / "other", "--report-only", "--add", str(path.parent)) == said
    assert not (tmp_path / "other/out").exists()
    # A trial that was not taken in yet: a process was killed before.
    shutil.copytree(done, tmp_path / "trial")
    (tmp_path / "trial/out/results.json").unlink()
    (numbers,) = (tmp_path / "trial/out").rglob("numbers.json")
    numbers.write_text(json.dumps({**json.loads(numbers.read_text()), key: value}))
    said = f"{numbers} does not hold a trial's numbers: {told}; remove it"
    assert refused(tmp_path / "trial", "--report-only") == said
    assert not (tmp_path / "trial/out/results.json").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda arm: arm.pop("rule"), "rule must be a table, got None"),
        (lambda arm: arm.update(rule="drop"), "rule must be a table, got 'drop'"),
        (lambda arm: arm.update(defaults=None), "defaults must be a table, got None"),
        (lambda arm: arm.update(defaults=3), "defaults must be a table, got 3"),
    ],
)
def test_an_arm_has_to_say_what_made_it(done, tmp_path, change, told):
    path, before = changed(done, tmp_path / "own", lambda table: change(arm_of(table)))
    assert refused(tmp_path / "own", "--report-only") == f"{path} does not hold results: arm drop: {told}"
    assert path.read_bytes() == before
    (numbers,) = (tmp_path / "own/out").rglob("numbers.json")
    held = json.loads(numbers.read_text())
    change(held)
    numbers.write_text(json.dumps(held))
    path.unlink()
    said = f"{numbers} does not hold a trial's numbers: {told}; remove it"
    assert refused(tmp_path / "own", "--report-only") == said


@pytest.mark.parametrize("machine", [{"gpu": HALF}, {HALF: 1}])
def test_a_machine_with_half_a_character_is_refused(done, tmp_path, machine):
    path, before = changed(done, tmp_path / "own", lambda table: table["environments"].append(machine))
    key = "gpu" if "gpu" in machine else "\\ud800"
    told = f"{key} must be a text that UTF-8 can hold, got '\\ud800'"
    said = f"{path} does not hold results: environments: {told}"
    assert refused(tmp_path / "own", "--report-only") == said
    assert path.read_bytes() == before
    shutil.copytree(done, tmp_path / "run")
    (environment,) = (tmp_path / "run/out").rglob("environment.json")
    environment.write_text(json.dumps(machine))
    said = f"{environment} does not say on what a run was made: {told}"
    assert refused(tmp_path / "run", "--report-only") == said


def test_what_a_run_that_diverged_leaves_is_a_page(done, tmp_path):
    """The largest numbers of each kind: of a loss all that float32 holds."""
    extremes = {name: limits_of(name)[1] for name in COLUMNS} | {"loss": 3.4e38, "perplexity": None}

    def change(table: dict[str, Any]) -> None:
        numbers = arm_of(table)["seeds"]["0"]
        numbers |= extremes | {"similarity": [[-1e40, 1e40], [None, 0]]}
        numbers["curve"] |= {"loss": [1538.0, None], "top1": [0, 1]}

    write(tmp_path / "experiments", one=ONE.replace("[]", '["curves", "loss", "similarity"]'))
    changed(done, tmp_path / "more", change)
    reproduce(tmp_path, "--report-only", "--add", str(tmp_path / "more/out"))
    text = (tmp_path / "out/report.md").read_text()
    assert text.count("](figures/") == 3
    assert f"{3.4e38:.3f}" in text


def test_some_damages(done, tmp_path):
    assert tracebacks(done, tmp_path, slice(None, None, 7)) == []


@pytest.mark.slow
def test_every_damage(done, tmp_path):
    assert tracebacks(done, tmp_path, slice(None)) == []
