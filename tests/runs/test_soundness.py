"""What makes results meaningless is said wherever they are shown, and only where it is so."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

import safari
from safari.cli import cli
from safari.config import parse
from safari.runs import CLASSIFICATION, RunFolder
from safari.runs.soundness import Course, course_of, warnings
from safari.view.page import freeze

FINE = Course(rounds=3, arrived=4, missing=2, scores=(0.1, 0.5, 0.7), diverged=False, dead=())


def changed(**fields: Any) -> Course:
    return Course(**{**vars(FINE), **fields})


@pytest.mark.parametrize(
    ("course", "words"),
    [
        (FINE, None),
        (changed(arrived=0, scores=(0.1, 0.1, 0.1)), "no update ever arrived"),
        (changed(rounds=0, arrived=0, missing=0, scores=()), None),
        (changed(scores=(0.1, 0.1, 0.1)), "the same in all 3 tests"),
        # Two tests may agree by chance.
        (changed(scores=(0.1, 0.1)), None),
        (changed(diverged=True), "diverged"),
        (changed(dead=("1.weight", "evil\x1b[2J")), r"nothing is left of 1.weight, evil\x1b[2J"),
    ],
)
def test_a_sentence_for_each_reason(course: Course, words: str | None) -> None:
    lines = warnings({"drop": [FINE, course]}, CLASSIFICATION)
    if words is None:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith("drop: ")
        assert words in line


@pytest.mark.parametrize(
    ("missing", "scores", "words"),
    [(2, 0.7, "cannot be compared"), (0, 0.7, "no update was lost"), (2, 0.6, None)],
)
def test_arms_that_end_alike(missing: int, scores: float, words: str | None) -> None:
    one, other = changed(missing=missing), changed(missing=missing, scores=(0.2, 0.4, scores))
    lines = warnings({"perfect": [one], "drop": [other]}, CLASSIFICATION)
    assert len(lines) == (words is not None)
    assert all(words in line for line in lines if words)
    # An arm alone has none to be compared with, and one that is behind may still go on.
    assert warnings({"drop": [one]}, CLASSIFICATION) == []
    assert warnings({"perfect": [one], "drop": [changed(rounds=2)]}, CLASSIFICATION) == []


def test_the_course_by_hand() -> None:
    def record(top1: float | None, loss: float | None, layers: dict[str, float]) -> dict[str, Any]:
        return {"top1": top1, "loss": loss, "arrived": [0], "missing": [1, 2], "layers": layers}

    records = [record(0.5, 1.0, {"a": 0.0}), record(None, None, {}), record(0.1, None, {"a": 0.2, "b": 0.0})]
    assert course_of(records, CLASSIFICATION, complete=True) == Course(3, 3, 6, (0.5, 0.1), True, ("b",))
    # The newest round of a run that goes on may simply not have been tested.
    assert not course_of(records[:2], CLASSIFICATION, complete=False).diverged
    assert course_of([], CLASSIFICATION, complete=False) == Course(0, 0, 0, (), False, ())


DEAD = {
    "name": "dead",
    "rounds": 4,
    "clients": 4,
    "arms": ["perfect", "drop"],
    "model": {"name": "mlp", "hidden": [8]},
    "pruning": {"pruner": "rand", "sparsity": 0.999, "allow_dead_layers": True},
    "local": {"lr": 1e-30},
    "uplink": {"name": "bernoulli", "p": 0.5},
    "checkpoint": {"every": 4},
}


def test_a_meaningless_run_says_so_below_the_table_on_the_page_and_in_the_summary(tmp_path) -> None:
    (tmp_path / "dead.toml").write_text(safari.toml.to_toml(parse(DEAD)))
    arguments = ["run", str(tmp_path / "dead.toml"), "--out", str(tmp_path / "run"), "--quiet"]
    shown = CliRunner().invoke(cli, arguments)
    assert shown.exit_code == 0, shown.output
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["warnings"]
    assert any("the same in all 4 tests" in line for line in told)
    assert "all 2 arms end with the same top-1 accuracy, so they cannot be compared" in told
    below = shown.stdout.partition("drop")[2]
    assert [line for line in below.splitlines() if line.startswith("warning: ")] == [
        f"warning: {t}" for t in told
    ]
    assert freeze([RunFolder.open(tmp_path / "run")])["table"]["warnings"] == told


def test_a_run_in_which_nothing_arrives(tmp_path, capsys) -> None:
    nothing = {**DEAD, "arms": ["drop"], "pruning": {}, "uplink": {"name": "lost"}}
    summary = safari.run(nothing, tmp_path / "run", report=False)
    (line,) = summary["warnings"]
    assert line == "drop: no update ever arrived, so this is the model that it began with"
    assert f"warning: {line}" in capsys.readouterr().err
