"""`safari compare` and `safari.compare`: seeds in pairs, by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import safari
from safari.cli import cli
from safari.errors import MissingExtraError, RunError, SafariError
from safari.runs import RunFolder
from safari.sweep import comparison

SMALL: dict[str, Any] = {
    "rounds": 2,
    "seeds": 2,
    "clients": 4,
    "arms": ["perfect", "drop"],
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"steps": 1, "batch": 8},
    "evaluation": {"every": 1, "last": 1},
    "uplink": {"p": 0.5},
    "wire": {"every": 0},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: `one`, `other` with another step size, `elsewhere` with another division of the data."""
    place = tmp_path_factory.mktemp("runs")
    changes: dict[str, dict[str, Any]] = {
        "one": {},
        "other": {"local": {"steps": 1, "batch": 8, "lr": 0.02}, "rounds": 3},
        "elsewhere": {"partition": {"name": "iid"}, "seeds": 3},
    }
    for name, change in changes.items():
        safari.run({**SMALL, **change}, place / name, progress=False, report=False)
    return place


def scores(run: Path, arm: str) -> list[float]:
    seeds = json.loads((run / "summary.json").read_text())["arms"][arm]["seeds"]
    return [numbers["top1"] for _, numbers in sorted(seeds.items())]


def test_two_arms_are_compared_seed_by_seed(runs: Path) -> None:
    (row,) = safari.compare(f"{runs}/one:perfect", ":drop").rows
    first, second = scores(runs / "one", "perfect"), scores(runs / "one", "drop")
    gaps = [a - b for a, b in zip(first, second, strict=True)]
    mean, half = sum(gaps) / 2, abs(gaps[0] - gaps[1]) / 2
    assert (row.one, row.other, row.paired) == ("perfect", "drop", True)
    assert row.mean == pytest.approx(mean)
    # With one degree of freedom the 97.5 % quantile is 12.706, and P(|T| > t) is 1 - 2 atan(t) / pi.
    assert row.interval is not None
    assert row.interval.high == pytest.approx(mean + 12.7062 * half, abs=1e-4)
    assert row.p == pytest.approx(1 - 2 * math.atan(abs(mean) / half) / math.pi)
    assert row.effect == pytest.approx(mean / (math.sqrt(2) * half))


def test_two_runs_are_compared_arm_by_arm_and_differences_are_named(runs: Path) -> None:
    found = safari.compare(safari.load(runs / "one"), runs / "other")
    assert [(row.one, row.other) for row in found.rows] == [
        ("one:perfect", "other:perfect"),
        ("one:drop", "other:drop"),
    ]
    known = sorted(row.p for row in found.rows if row.p is not None)
    assert min(row.adjusted for row in found.rows if row.adjusted is not None) == min(1.0, 2 * known[0])
    assert found.notes == ("The runs have 2 and 3 rounds.",)


def test_without_the_same_data_the_means_are_tested(runs: Path) -> None:
    (row, _) = safari.compare(runs / "one", runs / "elsewhere").rows
    first, second = scores(runs / "one", "perfect"), scores(runs / "elsewhere", "perfect")
    assert (row.paired, len(row.first), len(row.second)) == (False, 2, 3)
    assert row.mean == pytest.approx(sum(first) / 2 - sum(second) / 3)
    assert "partition" in safari.compare(runs / "one", runs / "elsewhere").notes[0]


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        ("one", "one", "one is compared with itself; name two of its arms as RUN:ARM and :ARM, of perfect, drop"),
        ("one:drop", ":drop", "one is compared with itself"),
        ("one:dorp", ":drop", "must be one of drop, perfect; got 'dorp' (did you mean 'drop'?)"),
        ("nothing", "one", "nothing"),
    ],
)  # fmt: skip
def test_mistakes_are_named(runs: Path, a: str, b: str, wanted: str) -> None:
    with pytest.raises(SafariError) as error:
        safari.compare(f"{runs}/{a}", b if b.startswith(":") else f"{runs}/{b}")
    assert wanted in str(error.value)


def test_a_run_without_a_finished_seed_has_nothing_to_compare(runs: Path, tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "begun", RunFolder.open(runs / "one").config)
    with pytest.raises(RunError, match="have no finished seed"):
        safari.compare(runs / "one", tmp_path / "begun")


def test_the_command_prints_a_table_json_and_a_figure(runs: Path, tmp_path: Path) -> None:
    arguments = ["compare", f"{runs}/one:perfect", ":drop"]
    shown = CliRunner().invoke(cli, [*arguments, "--figure", str(tmp_path / "a.pdf")])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[0].split("  ")[-1].strip() == "seeds"
    assert "perfect minus drop" in shown.stdout
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    table = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)
    assert table["rows"][0]["mean"] == safari.compare(*arguments[1:]).rows[0].mean
    wrong = CliRunner().invoke(cli, [*arguments, "--figure", "a.jpg"])
    assert "--figure must end in .png, .svg, .pdf, got 'a.jpg'" in str(wrong.exception)


def test_without_scipy_the_extra_is_named(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "scipy", None)
    with pytest.raises(
        MissingExtraError, match=r"intervals and tests need scipy: pip install 'safari-fl\[stats\]'"
    ):
        comparison.compare(f"{runs}/one:perfect", ":drop")
