"""`safari sweep` and `safari run --jobs`: the files of a user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import safari
from safari.cli import cli
from safari.errors import RunError
from safari.sweep import read
from safari.toml import to_toml
from sweep.kit import BASE, write

FIELDS = """
base = "base/tiny.toml"
[set]
rounds = 2
[axes]
"pruning.sparsity" = [0.5, 0.8]
"local.lr" = [0.002, 0.02]
"""


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(cli, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_values_of_fields_are_cases_in_all_combinations(tmp_path: Path) -> None:
    (sweep,) = read([write(tmp_path, mine=FIELDS) / "mine.toml"])
    assert {c.name: (c.config.pruning.sparsity, c.config.local.lr) for c in sweep.cases} == {
        "0.5.0.002": (0.5, 0.002),
        "0.5.0.02": (0.5, 0.02),
        "0.8.0.002": (0.8, 0.002),
        "0.8.0.02": (0.8, 0.02),
    }


def test_without_a_base_it_is_the_demo_that_varies(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[axes]\n"rounds" = [3]\n')
    (sweep,) = read([tmp_path / "mine.toml"])
    assert sweep.cases[0].config.rounds == 3
    assert sweep.cases[0].config.data == safari.Config().data


def test_a_sweep_is_worked_off_once_and_its_table_is_that_of_the_numbers(tmp_path: Path) -> None:
    file, out = write(tmp_path, mine=FIELDS) / "mine.toml", tmp_path / "out"
    shown = invoke("sweep", file, "--arms", "*", "--set", "arms=perfect,drop", "--out", out)
    again = json.loads(invoke("sweep", file, "--set", "arms=perfect,drop", "--out", out, "--json"))["mine"]
    assert (again["finished"], again["trials"]) == (16, 16)
    # One arm is ranked, so that the cases are compared: one is the best of all four.
    rows = [row for row in again["rows"] if row["arm"] == "drop"]
    best = max(rows, key=lambda row: row["mean"])
    assert [row["case"] for row in rows if row["mark"] == "best"] == [best["case"]]
    assert all(row["behind"] == pytest.approx(best["mean"] - row["mean"]) for row in rows if row != best)
    assert all(row["mark"] == "" and row["p"] is None for row in again["rows"] if row["arm"] == "perfect")
    table = (out / "mine/table.md").read_text()
    for row in again["rows"]:
        assert f"{100 * row['mean']:.1f} ±" in shown
        assert f"| {row['case']} / {row['arm']} |" in table
    frame = safari.load_sweep(out).frame()
    assert len(frame) == 16
    means = frame.groupby(["case", "arm"])["top1"].mean()
    assert all(means[row["case"], row["arm"]] == pytest.approx(row["mean"]) for row in again["rows"])


def test_several_arms_of_a_case_are_compared_with_each_other(tmp_path: Path) -> None:
    file = write(tmp_path, mine=FIELDS) / "mine.toml"
    found = json.loads(invoke("sweep", file, "--set", "seeds=1", "--out", tmp_path / "out", "--json"))["mine"]
    best = [row["case"] for row in found["rows"] if row["mark"] == "best"]
    assert sorted(best) == ["0.5.0.002", "0.5.0.02", "0.8.0.002", "0.8.0.02"]


def test_a_folder_without_a_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no results\.json"):
        safari.load_sweep(tmp_path)


def test_files_of_one_name_and_files_without_a_small_version_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "a", mine=FIELDS) / "mine.toml"
    other = write(tmp_path / "b", mine=FIELDS) / "mine.toml"
    wrong = CliRunner().invoke(cli, ["sweep", str(one), str(other), "--out", str(tmp_path / "out")])
    assert "FILE must have a name of its own, got 'mine' twice" in str(wrong.exception)
    wrong = CliRunner().invoke(cli, ["sweep", str(one), "--quick", "--out", str(tmp_path / "out")])
    assert f"{one} has no [quick] table: run it without --quick" in str(wrong.exception)
    assert not (tmp_path / "out").exists()


def test_a_run_in_processes_comes_to_the_same(tmp_path: Path) -> None:
    import tomllib

    (tmp_path / "my.toml").write_text(to_toml(safari.parse(tomllib.loads(BASE))))
    for jobs in (1, 2):
        invoke("run", tmp_path / "my.toml", "--jobs", jobs, "--out", tmp_path / str(jobs), "-q")
    records = sorted(path.relative_to(tmp_path / "1") for path in (tmp_path / "1").rglob("rounds.jsonl"))
    assert len(records) == 6
    for path in (*records, "summary.json", "clients.json", "model.json"):
        assert (tmp_path / "1" / path).read_bytes() == (tmp_path / "2" / path).read_bytes(), path
    assert not list((tmp_path / "2").rglob("numbers.json"))


def test_a_tracker_and_processes_do_not_go_together(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        cli, ["run", "--jobs", "2", "--set", "track.tensorboard=true", "--out", str(tmp_path / "x")]
    )
    assert "--jobs must be 1 where a tracker follows the run (track), got 2" in str(done.exception)
    assert not (tmp_path / "x").exists()


def test_without_the_package_of_the_claims_reproduce_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import safari.cli as commands

    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    done = CliRunner().invoke(commands._reproduce(), ["digits", "--jobs", "2"])
    assert str(done.exception) == (
        "reproduce needs the package safari-evidence: pip install ./evidence in the sources of safari-fl"
    )
