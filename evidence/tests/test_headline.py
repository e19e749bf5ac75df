"""The figures of the README."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from claims import TINY, Listener, write
from safari.errors import RunError
from safari.report.style import INK
from safari.sweep import Results, execute, units_of
from safari_evidence.experiments import find, read
from safari_evidence.headline import ARMS, Line, Row, behind, race

ROOT = Path(__file__).parent.parent.parent


def trials(*top1: float) -> dict[int, dict]:
    return {seed: {"top1": value} for seed, value in enumerate(top1)}


ROWS = [
    Row("bursts", {"perfect": trials(0.5, 0.7), "drop": trials(0.4, 0.4), "safari+": trials(0.5, 0.7)}),
    Row("waves", {"perfect": trials(0.5), "drop": trials(0.25), "safari+": trials(0.75)}),
]


def test_dots_are_differences_and_bars_their_intervals() -> None:
    figure = behind(ROWS, "70 % lost", ["drop", "safari+"])
    (axes,) = figure.axes
    dots = [container.lines[0] for container in axes.containers]
    assert [float(dot.get_xdata()[0]) for dot in dots] == pytest.approx([-20, 0, -25, 25])
    assert [round(float(dot.get_ydata()[0])) for dot in dots] == [0, 0, 1, 1]
    # -10 and -30 points by seed: a mean of -20, a standard error of 10, times t of 12.706; one seed has none.
    ends = [c.lines[2][0].get_segments()[0][:, 0].tolist() for c in axes.containers if c.has_xerr]
    assert ends == [pytest.approx([-147.06, 107.06], abs=0.01), pytest.approx([0, 0])]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["bursts", "waves"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "the missing are dropped",
        "safari+",
    ]
    assert figure.get_suptitle() == "70 % lost"


@pytest.mark.parametrize(
    ("arms", "who"),
    [
        ({"perfect": trials(0.5)}, "drop"),
        ({"perfect": {}, "drop": trials(0.5)}, "perfect"),
        ({"perfect": {0: {"top1": 0.5}}, "drop": {1: {"top1": 0.5}}}, "drop and perfect with the same seed"),
    ],
)
def test_what_is_not_there_is_named(arms: dict, who: str) -> None:
    with pytest.raises(RunError, match=f"^the results for 'bursts' have no finished trial of {who}$"):
        behind([Row("bursts", arms)], "", ["drop"])


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_headline", ROOT / "evidence/make_headline.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def race_line(name: str, curves: list[dict]) -> Line:
    return Line(name, 0, dict(enumerate({"curve": curve} for curve in curves)), (9, 0), "left")


def test_a_race_is_accuracy_against_megabytes_over_seeds_and_pairs_of_rounds() -> None:
    # Two seeds; rounds 9 and 10 are one point, their mean, and so are 19 and 20.
    first = {"round": [9, 10, 19, 20], "top1": [0.1, 0.3, 0.5, 0.7], "megabytes_up": [1.0, 3.0, 8.0, 12.0]}
    other = {"round": [9, 10, 19, 20], "top1": [0.3, 0.5, 0.6, 0.8], "megabytes_up": [1.0, 3.0, 10.0, 10.0]}
    slow = {"round": [9, 10], "top1": [0.1, 0.1], "megabytes_up": [100.0, 300.0]}
    figure = race([race_line("ours", [first, other]), race_line("slow", [slow])], "words", "the goal")
    (axes,) = figure.axes
    drawn = [line.get_xydata().tolist() for line in axes.lines if len(line.get_xdata()) > 1]
    ours, goal, *_ = drawn
    assert ours == [pytest.approx([2, 30]), pytest.approx([10, 65])]
    assert [y for _, y in goal] == pytest.approx([65, 65])
    # The band: one standard deviation over the two seeds, 20 and 40, then 60 and 70.
    edges = axes.collections[0].get_paths()[0].vertices
    assert edges[:, 1].min() == pytest.approx(30 - 200**0.5)
    assert edges[:, 1].max() == pytest.approx(65 + 50**0.5)
    assert [text.get_text() for text in axes.texts] == ["ours", "the goal", "slow"]


def test_a_race_names_who_has_no_curve() -> None:
    with pytest.raises(
        RunError, match=r"^the results have no finished trial of 'ours' with its accuracies and bytes$"
    ):
        race([Line("ours", 0, {}, (9, 0), "left")], "", "")


def test_the_tool_writes_light_and_dark(tool: ModuleType, tmp_path: Path) -> None:
    arms = (
        '[set]\nseeds = 1\narms = ["perfect", "drop", "fedau", "safari", "mifa", "safari+"]\n\n[axes.pruner]'
    )
    folder = write(tmp_path / "files", tiny=TINY.replace("[axes.pruner]", arms))
    out = tmp_path / "out"
    (experiment,) = read(find(folder), [])
    results = Results.open(out)
    execute([u for case in experiment.cases for u in units_of(case, out, results, 1.0)], out, Listener())
    results.gather(experiment, out)
    results.save(out)
    cases = {"mag": "tiny/mag", "rand": "tiny/rand"}
    rows = tool.rows_of(Results.open(out), cases, folder)
    assert [(row.name, sorted(row.arms["safari+"])) for row in rows] == [("mag", [0]), ("rand", [0])]
    paths = tool.save(behind(rows, "words"), tmp_path / "drawn", "rules")
    assert [path.name for path in paths] == ["rules.svg", "rules-dark.svg"]
    light, dark = (path.read_bytes() for path in paths)
    ink = INK.encode()
    assert ink in light
    assert ink not in dark
    again = tool.save(behind(rows, "words"), tmp_path / "again", "rules")
    assert [path.read_bytes() for path in again] == [light, dark]


def test_all_that_the_readme_shows_is_in_the_records(tool: ModuleType) -> None:
    for line in tool.lines_of(Results.open(ROOT / "results/evidence-recipe"), ROOT / "evidence/experiments"):
        assert len(line.trials) == 5, line.name
    results = Results.open(ROOT / "results/evidence-second")
    rows = tool.rows_of(results, tool.ROWS, ROOT / "evidence/experiments")
    for row in rows:
        for arm in ("perfect", *ARMS):
            assert len(row.arms[arm]) >= 3, (row.name, arm)
    # No setting with plain clients that was run in full is left out of the picture.
    (experiment,) = read(find(ROOT / "evidence/experiments", ["rules"]), [])
    plain = [case for case in experiment.cases if case.name.startswith("fedavg.")]
    run = [case for case in plain if all(results.arms(case)[arm] for arm in ARMS)]
    assert {f"rules/{case.name}" for case in run} == set(tool.ROWS.values())
