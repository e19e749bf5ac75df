"""The tables, from numbers that were made up: differences over cells, the race to a goal, versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from claims import TINY, write
from safari.sweep import Results, trials_by_version
from safari.sweep.numbers import maker_of
from safari_evidence.experiments import Experiment, find, read
from safari_evidence.tables import main_table, matrices, race, rivals


def experiment_with(folder: Path, **fields: str) -> Experiment:
    head = "".join(f'{key} = "{value}"\n' for key, value in fields.items())
    (experiment,) = read(find(write(folder, tiny=head + TINY)), [("seeds", 3)])
    return experiment


def results_of(experiment: Experiment, scores: dict[tuple[str, str], list[Any]]) -> Results:
    """Results with these trials by (case, arm); a number stands for its top-1."""
    cases: dict[str, Any] = {}
    for case in experiment.cases:
        arms = {}
        for arm in case.config.arms:
            found = scores.get((case.name, arm.name), [])
            seeds = {
                str(s): {"code": ["aa"], "curve": {}, **(v if isinstance(v, dict) else {"top1": v})}
                for s, v in enumerate(found)
            }
            arms[arm.name] = {**maker_of(arm), "seeds": seeds}
        cases[case.name] = {"setting": case.setting, "arms": arms}
    return Results({"tiny": {"cases": cases}}, [])


SCORES = {
    ("mag", "safari"): [0.50, 0.60, 0.70],
    # Behind by 10, 11 and 9 points.
    ("mag", "drop"): [0.40, 0.49, 0.61],
    ("mag", "perfect"): [0.9, 0.9, 0.9],
    ("rand", "safari"): [0.50, 0.60, 0.70],
    # Ahead by 1, behind by 2 and 4.
    ("rand", "drop"): [0.51, 0.58, 0.66],
}


def test_a_rival_over_all_cases_and_case_by_case(tmp_path: Path) -> None:
    experiment = experiment_with(tmp_path, compare="safari")
    whole, single = rivals(experiment, results_of(experiment, SCORES))
    ((rival, mean, ahead, shown, behind, p),) = whole.rows
    # By seed the two cases differ by 4.5, 6.5 and 6.5 points: 5.83, standard error 0.667, times t of 4.303.
    assert (rival, mean) == ("drop", "+5.8 ± 2.9")
    assert (ahead, shown, behind) == ("2 of 2", "1", "0")
    # Two means of +10 and +1.67: of four patterns of signs the one seen and its mirror are as extreme.
    assert p == "0.50"
    # Errors 0.577 and 1.453 points: p 0.003 and 0.37, the first times two tests.
    assert single.rows == [["drop", "+10.0 ± 2.5▲", "+1.7 ± 6.3"]]
    assert "Holm's correction over all 2 of them" in whole.note


def test_a_rival_by_what_cases_have_in_common(tmp_path: Path) -> None:
    text = """
compare = "safari"
unranked = ["perfect"]
title = "t"
claim = "c"
base = "base/tiny.toml"
[axes.sparsity]
half = { pruning.sparsity = 0.5 }
most = { pruning.sparsity = 0.9 }
none = { pruning.sparsity = 0.0 }
[axes.link]
even = { uplink = { name = "bernoulli", p = 0.5 } }
wave = { uplink = { name = "sine", period = 4 } }
"""
    (experiment,) = read(find(write(tmp_path, tiny=text)), [("seeds", 3)])
    scores = {
        # Ahead of dropping by 2, 3 and 4 points, and by 4, 5 and 6.
        ("half.even", "safari"): [0.52, 0.53, 0.54],
        ("half.even", "drop"): [0.50, 0.50, 0.50],
        ("half.wave", "safari"): [0.54, 0.55, 0.56],
        ("half.wave", "drop"): [0.50, 0.50, 0.50],
        ("half.even", "perfect"): [0.52, 0.53, 0.54],
        # Behind by 2 with each seed; the other link was not run.
        ("most.even", "safari"): [0.48, 0.48, 0.48],
        ("most.even", "drop"): [0.50, 0.50, 0.50],
    }
    _, groups, _ = rivals(experiment, results_of(experiment, scores))
    # The case without losses of the second link shares the first one's perfect network: 0, and 2 points ahead of it.
    # By seed: 3, 4 and 5 points, so ± 4.303 / √3; over all three cases 1.33, 2 and 2.67.
    assert groups.header == ["safari minus", "perfect", "drop"]
    assert groups.rows == [
        ["half", "+1.0 ± 0.0", "+4.0 ± 2.5"],
        ["most", "–", "-2.0 ± 0.0"],
        ["all 3", "+1.0 ± 0.0", "+2.0 ± 1.7"],
    ]


def test_nothing_to_compare_is_no_table(tmp_path: Path) -> None:
    experiment = experiment_with(tmp_path)
    assert list(rivals(experiment, results_of(experiment, SCORES))) == []
    named = experiment_with(tmp_path, compare="safari")
    assert list(rivals(named, results_of(named, {}))) == []


def test_the_matrix_has_half_intervals_and_marks(tmp_path: Path) -> None:
    experiment = experiment_with(tmp_path)
    (table,) = matrices(experiment, results_of(experiment, SCORES))
    assert list(table.header) == ["", "mag", "rand"]
    # A standard deviation of 10 points and three seeds: 4.303 × 10 / √3 = 24.8.
    assert {row[0]: row[1:] for row in table.rows} == {
        "perfect": ["90.0 ± 0.0", "–"],
        "drop": ["50.0 ± 26.2", "*58.3 ± 18.6*"],
        "safari": ["**60.0 ± 24.8**", "**60.0 ± 24.8**"],
    }


def trial(final: float, curve: list[float], sent: list[float] | None = None) -> dict[str, Any]:
    rounds = [10 * (k + 1) for k in range(len(curve))]
    return {
        "top1": final,
        "curve": {"round": rounds, "top1": curve} | ({"megabytes_up": sent} if sent else {}),
    }


def test_the_race_is_to_the_goals_final_accuracy_with_the_same_seed(tmp_path: Path) -> None:
    experiment = experiment_with(tmp_path, goal="mag/perfect")
    results = results_of(
        experiment,
        {
            ("mag", "perfect"): [trial(0.5, [0.4, 0.6]), trial(0.7, [0.5, 0.7])],
            ("rand", "safari"): [
                trial(0.6, [0.3, 0.4, 0.5], [1.0, 2.0, 3.0]),
                trial(0.6, [0.3, 0.8, 0.5], [2.0, 4.0, 6.0]),
            ],
            ("rand", "drop"): [trial(0.6, [0.3, 0.4]), trial(0.6, [0.3, 0.4])],
        },
    )
    table = race(experiment, results)
    assert table is not None
    rows = {(row[0], row[1]): row[2:] for row in table.rows}
    # Seed 0 reaches 0.5 in round 30 after 3 MB, seed 1 reaches 0.7 in round 20 after 4 MB.
    assert rows["rand", "safari"] == ["25 (2 of 2)", "3.5", "–", "–"]
    assert rows["rand", "drop"] == ["– (0 of 2)", "–", "–", "–"]
    assert rows["mag", "perfect"] == ["20 (2 of 2)", "–", "–", "–"]
    assert rows["mag", "drop"] == ["–"] * 4
    assert race(experiment_with(tmp_path), results) is None


def test_versions_have_a_column_where_there_are_several(tmp_path: Path) -> None:
    experiment = experiment_with(tmp_path)
    results = results_of(experiment, SCORES)
    assert trials_by_version([experiment], results) == {"aa": 15}
    assert "code" not in main_table(experiment, results).header
    seeds = results.entries["tiny"]["cases"]["mag"]["arms"]["drop"]["seeds"]
    seeds["0"]["code"], seeds["1"]["code"] = ["aa", "bb"], []
    assert trials_by_version([experiment], results) == {"aa": 14, "bb": 1, "unknown": 1}
    table = main_table(experiment, results)
    codes = {(row[0], row[1]): row[-1] for row in table.rows}
    assert table.header[-1] == "code"
    assert codes["mag", "drop"] == "aa, bb, unknown"
    assert codes["mag", "safari"] == "aa"
    assert ("rand", "perfect") not in codes


def test_what_was_not_run_is_named_below_the_tables(tmp_path: Path) -> None:
    experiment = experiment_with(tmp_path, compare="safari")
    assert len(main_table(experiment, results_of(experiment, {})).rows) == 6
    (whole,) = matrices(experiment, results_of(experiment, {}))
    assert len(whole.rows) == 3
    some = results_of(experiment, {("mag", "drop"): [0.5], ("mag", "safari"): [0.6]})
    table = main_table(experiment, some)
    assert [row[:2] for row in table.rows] == [["mag", "drop"], ["mag", "safari"]]
    assert table.note.endswith(" Not run: rand, mag/perfect.")
    (matrix,) = matrices(experiment, some)
    assert [row[0] for row in matrix.rows] == ["drop", "safari"]
    assert matrix.note.endswith(" Not run: perfect.")
    _, single = rivals(experiment, some)
    assert list(single.header) == ["safari minus", "mag"]


@pytest.mark.parametrize("seeds", [1, 3])
def test_one_seed_has_no_interval(tmp_path: Path, seeds: int) -> None:
    experiment = experiment_with(tmp_path)
    table = main_table(experiment, results_of(experiment, {("mag", "drop"): [0.5] * seeds}))
    row = next(row for row in table.rows if row[:2] == ["mag", "drop"])
    assert row[2] == ("50.0" if seeds == 1 else "50.0 ± 0.0")
