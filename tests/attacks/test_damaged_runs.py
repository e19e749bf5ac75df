"""Damaged run folders: every command ends well or with an error in words, never with a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import pytest

import safari
from attacks.damage import ENDLESS, TRIAL, damages
from runs.kit import TINY
from safari.cli import cli
from safari.errors import SafariError
from safari.report.gather import read_run
from safari.runs import RunFolder
from safari.runs.tables import TABLES
from safari.view import write_report
from safari.view.page import frozen_page

# How many of the damages are tried without `-m slow`: the same ones until a damage is added.
FAST = 48


@pytest.fixture(autouse=True)
def no_figures(request, monkeypatch):
    """Drawing takes seconds; what is drawn is read by `figures`, and the slow test draws."""
    if "drawn" not in request.node.name:
        monkeypatch.setattr("safari.cli.finish.write_figures", lambda runs, folder: None)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A finished run of two arms, with a page and a frame."""
    run = tmp_path_factory.mktemp("good") / "run"
    safari.run(TINY, run, progress=False)
    write_report([RunFolder.open(run)], run / "report.html")
    command("wire", "bench", run, "--save", run.parent / "frame")
    return run


def command(*arguments: object) -> str:
    """A command in this process, as `safari.cli.main` would run it."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        cli.main([str(a) for a in arguments], prog_name="safari", standalone_mode=False)
    return out.getvalue()


def longer(run: Path) -> None:
    """As if it were not finished; a config that is damaged stays as it is."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = (run / "config.toml").read_text()
        (run / "config.toml").write_text(text.replace("rounds = 7\n", "rounds = 8\n"))


def summary(run: Path) -> None:
    json.loads(command("show", run, "--json"))


def figures(run: Path) -> None:
    read_run(RunFolder.open(run))


def loaded(run: Path) -> None:
    with warnings.catch_warnings():
        # Lines that were left out are named in warnings.
        warnings.simplefilter("ignore")
        found = safari.load(run)
        for table in TABLES:
            found.columns(table)
        found._repr_html_()
        repr(found)
        found.model("safari")


def page(run: Path) -> None:
    frozen_page([RunFolder.open(run)])


def finished(run: Path) -> None:
    command("resume", run, "--json", "--quiet")


def going_on(run: Path) -> None:
    longer(run)
    safari.resume(run, progress=False)


def going_back(run: Path) -> None:
    safari.resume(run, from_round=3, progress=False)


def upload(run: Path) -> None:
    command("wire", "bench", run, "--json")


def frame(run: Path) -> None:
    command("wire", "inspect", run.parent.parent / "frame", "--run", run, "--json")


def show(run: Path) -> None:
    command("show", run)


LOOKING: Sequence[Callable[[Path], None]] = (summary, figures, page, loaded)
RUNNING: Sequence[Callable[[Path], None]] = (finished, going_on, going_back, upload, frame)


def survives(good: Path, place: Path, damage: Callable[[Path], None], use: Callable[[Path], None]) -> str:
    """The traceback's last line, or nothing: a good end, or an error in words."""
    run = Path(shutil.copytree(good, place / "run"))
    damage(run)
    try:
        use(run)
    except (SafariError, click.ClickException) as error:
        text = str(error)
        return (
            ""
            if text.strip() and len(text) < 5_000
            else f"{use.__name__}: no words, or too many: {text[:80]!r}"
        )
    except Exception as error:
        return f"{use.__name__}: {type(error).__name__}: {str(error)[:200]}"
    finally:
        shutil.rmtree(place)
    return ""


def some_uses(name: str) -> Sequence[Callable[[Path], None]]:
    """All that only look, and one of those that run, by the damage's name."""
    return *LOOKING, RUNNING[zlib.crc32(name.encode()) % len(RUNNING)]


def all_uses(name: str) -> Sequence[Callable[[Path], None]]:
    """All; but of the hundreds of fields with a wrong value, some."""
    return some_uses(name) if " wrong " in name else (*LOOKING, *RUNNING)


def tracebacks(good: Path, tmp_path: Path, chosen: Sequence[tuple[str, object]], uses) -> list[str]:
    shutil.copy(good.parent / "frame", tmp_path / "frame")
    found = []
    for number, (name, damage) in enumerate(chosen):
        for use in LOOKING if ENDLESS in name else uses(name):
            (tmp_path / str(number)).mkdir()
            problem = survives(good, tmp_path / str(number), damage, use)
            found += [f"{name}: {problem}"] if problem else []
    return found


def test_a_sample_of_all_damages(good, tmp_path):
    every = list(damages(good))
    assert len(every) > 700
    step = len(every) / FAST
    chosen = [every[int(k * step)] for k in range(FAST)]

    assert tracebacks(good, tmp_path, chosen, some_uses) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_damage_and_every_use(good, tmp_path, part):
    every = list(damages(good))
    assert tracebacks(good, tmp_path, every[part::8], all_uses) == []


@pytest.mark.slow
def test_figures_are_drawn_or_refused_in_words(good, tmp_path):
    every = list(damages(good))
    assert tracebacks(good, tmp_path, every[::40], lambda name: (show,)) == []


def test_the_good_run_has_no_problem(good, tmp_path):
    """What the others are held against."""
    shutil.copy(good.parent / "frame", tmp_path / "frame")
    for use in (*LOOKING, *RUNNING):
        run = Path(shutil.copytree(good, tmp_path / f"by-{use.__name__}" / "run"))
        use(run)
    assert (good / TRIAL / "rounds.jsonl").read_bytes()
