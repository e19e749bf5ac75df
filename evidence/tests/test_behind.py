"""The figure of points behind a perfect network over an axis, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from claims import write
from safari.sweep import Results
from safari.sweep.numbers import maker_of
from safari_evidence.experiments import Experiment, find, read
from safari_evidence.figures import figures_of

TEXT = """
title = "Behind"
claim = "words"
base = "base/tiny.toml"
show = ["behind"]
[axes.client]
one = {}
two = { local.lr = 0.5 }
[axes.links]
even = { uplink.p = 0.5 }
uneven = { uplink.p = [1, 0.1] }
"""
# By links and arm: top-1 of two seeds, and the share of right stand-ins.
SCORES = {
    ("even", "perfect"): ([0.80, 0.90], None),
    ("even", "drop"): ([0.78, 0.86], None),
    ("uneven", "drop"): ([0.50, 0.50], None),
    ("even", "safari"): ([0.80, 0.89], 0.5),
    ("uneven", "safari"): ([0.70, 0.82], 0.25),
}


def results_of(experiment: Experiment) -> Results:
    cases = {}
    for case in experiment.cases:
        arms = {}
        for arm in case.config.arms:
            scores, right = SCORES.get((case.values[1], arm.name), ([], None))
            seeds = {str(seed): {"top1": score, "right_group": right} for seed, score in enumerate(scores)}
            if seeds and case.values[0] == "one":
                arms[arm.name] = {**maker_of(arm), "seeds": seeds}
        cases[case.name] = {"setting": case.setting, "arms": arms}
    return Results({experiment.name: {"cases": cases}}, [])


def test_points_behind_and_right_stand_ins_are_those_of_the_seeds(tmp_path: Path) -> None:
    (experiment,) = read(find(write(tmp_path, mine=TEXT)))
    (figure,) = figures_of(experiment, results_of(experiment))
    assert figure.name == "mine-behind"
    top, empty, below, _ = figure.figure.axes
    assert [axes.get_title(loc="left") for axes in (top, empty)] == ["one", "two"]
    found = {}
    for bars in top.containers:
        line, _, (interval,) = bars
        low, high = interval.get_segments()[0][:, 1]
        found[bars.get_label()] = (list(line.get_ydata()), high - low)
    # Against the perfect network of the same seed, which is lent by the even links: 2 and 4 points, 30 and 40.
    assert found["drop"][0] == pytest.approx([3.0, 35.0])
    assert found["safari"][0] == pytest.approx([0.5, 9.0])
    # Two seeds one point on each side of the mean: the interval is 12.706 on each side.
    assert found["drop"][1] == pytest.approx(2 * 12.7062, abs=1e-3)
    assert [list(line.get_ydata()) for line in below.get_lines()] == [pytest.approx([50.0, 25.0])]
    assert list(empty.containers) == []


def test_without_numbers_there_is_no_figure(tmp_path: Path) -> None:
    (experiment,) = read(find(write(tmp_path, mine=TEXT)))
    assert list(figures_of(experiment, Results({}, []))) == []
