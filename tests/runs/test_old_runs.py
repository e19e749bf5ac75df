"""A run of version 0.1, stopped after round 5 with a checkpoint of round 3: shown, and gone on with, as if by today.

`version-0.1` was written by the first version: one checkpoint without digest or seed, no `plugins.json`, no
`task.json`, no `code.json`, and a config without the fields that came later.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import safari
from safari.report.gather import read_run
from safari.runs import RunFolder, summarise
from safari.view.page import frozen_page

EXACT = ("round", "trained", "arrived", "missing", "stand_ins", "density")
OLD = Path(__file__).parent / "version-0.1"


@pytest.fixture
def run(tmp_path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "run"))


def lines(run: Path, arm: str) -> list[dict]:
    return [json.loads(line) for line in (run / f"trials/{arm}/seed-0/rounds.jsonl").read_text().splitlines()]


def test_it_can_be_shown(run):
    folder = RunFolder.open(run)
    summary = summarise(folder)
    assert [summary["arms"][arm]["seeds"]["0"]["rounds"] for arm in summary["arms"]] == [5, 5, 5]
    assert summary["arms"]["drop"]["top1"]["mean"] is not None
    assert [arm.name for arm in read_run(folder).arms] == ["drop", "safari", "patient"]
    assert "patient" in frozen_page([folder])
    assert [trial.done() for trial in folder.trials()] == [3, 3, 3]


def test_it_goes_on_to_the_numbers_of_today(run, tmp_path):
    config = RunFolder.open(run).config
    safari.resume(run, progress=False)
    safari.run(config, tmp_path / "today", progress=False)
    for arm in ("drop", "safari", "patient"):
        assert lines(run, arm)[:3] == lines(OLD, arm)[:3], "what was done stays as it was written"
        fresh = lines(tmp_path / "today", arm)
        assert len(lines(run, arm)) == len(fresh) == 7
        for found in (lines(OLD, arm), lines(run, arm)):
            for old, new in zip(found, fresh, strict=False):
                assert {key: new[key] for key in EXACT} == {key: old[key] for key in EXACT}
                # Up to rounding, which differs between machines; tests/engine/test_recorded.py looks at each bit.
                assert (new["loss"] or 0) == pytest.approx(old["loss"] or 0, rel=1e-3)


def test_it_can_go_back_to_its_checkpoint_and_to_the_start(run):
    safari.resume(run, from_round=3, progress=False)
    assert len(lines(run, "drop")) == 7
    cut = run / "trials/drop/seed-0/cut-1/rounds.jsonl"
    assert [json.loads(line)["round"] for line in cut.read_text().splitlines()] == [4, 5]
    safari.resume(run, from_round=0, progress=False)
    assert len(lines(run, "drop")) == 7
