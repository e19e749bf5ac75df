"""`safari show` of a run with damaged lines: they are left out and named, and the rest is shown."""

from __future__ import annotations

import json

from click.testing import CliRunner

from safari.cli import cli
from safari.config import parse
from safari.runs import RunFolder
from view.made_up import record


def made(tmp_path, damaged):
    run = RunFolder.create(tmp_path / "run", parse({"rounds": 40, "clients": 3, "arms": ["drop"]}))
    trial = run.trial("drop", 0)
    trial.append(record(1), {})
    with trial.rounds.open("a") as file:
        file.write("nonsense\n" * damaged)
    trial.append(record(3, top1=0.7), {})
    return run


def test_damaged_lines_are_named_and_the_rest_is_shown(tmp_path):
    run = made(tmp_path, damaged=1)
    found = CliRunner().invoke(cli, ["show", str(run.path)], standalone_mode=False)
    assert found.exception is None
    note = f"note: {run.path}: left out: drop, seed 0: rounds.jsonl, line 2 is not a round's record: not JSON"
    assert note in found.stderr
    assert "60.0" in found.stdout, "the mean of the two that are whole"
    assert (run.path / "report.html").exists()


def test_many_damaged_lines_are_counted(tmp_path):
    run = made(tmp_path, damaged=25)
    found = CliRunner().invoke(cli, ["show", str(run.path), "--json"], standalone_mode=False)
    summary = json.loads(found.stdout)[str(run.path)]
    assert summary["arms"]["drop"]["seeds"]["0"]["rounds"] == 3
    assert found.stderr.count("note: ") == 21
    assert found.stderr.endswith(f"note: {run.path}: 5 more lines were left out\n")
