"""The figure at the top of the README."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from evidence.kit import TINY, Listener, write
from safari.errors import RunError
from safari.evidence import Results, execute, find, read, units_of
from safari.evidence.headline import ARMS, Row, headline
from safari.report.style import INK

ROOT = Path(__file__).parent.parent.parent


def trials(*top1: float) -> dict[int, dict]:
    return {seed: {"top1": value} for seed, value in enumerate(top1)}


ROWS = [
    Row("bursts", {"perfect": trials(0.5, 0.7), "drop": trials(0.4, 0.4), "safari+": trials(0.5, 0.7)}),
    Row("waves", {"perfect": trials(0.5), "drop": trials(0.25), "safari+": trials(0.75)}),
]


def test_dots_are_differences_and_bars_their_intervals() -> None:
    figure = headline(ROWS, "70 % lost", ["drop", "safari+"])
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
        headline([Row("bursts", arms)], "", ["drop"])


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_headline", ROOT / "tools/make_headline.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tool_writes_light_dark_and_png(tool: ModuleType, tmp_path: Path) -> None:
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
    paths = tool.draw(out, tmp_path / "drawn", "words", cases, folder)
    assert [path.name for path in paths] == ["headline.svg", "headline-dark.svg", "headline.png"]
    light, dark, png = (path.read_bytes() for path in paths)
    ink = INK.encode()
    assert ink in light
    assert ink not in dark
    assert png.startswith(b"\x89PNG")
    again = tool.draw(out, tmp_path / "again", "words", cases, folder)
    assert [path.read_bytes() for path in again] == [light, dark, png]


def test_all_that_the_readme_shows_is_in_the_records(tool: ModuleType) -> None:
    results = Results.open(ROOT / "results/evidence-second")
    rows = tool.rows_of(results, tool.ROWS, ROOT / "experiments")
    for row in rows:
        for arm in ("perfect", *ARMS):
            assert len(row.arms[arm]) >= 3, (row.name, arm)
    # No setting with plain clients that was run in full is left out of the picture.
    (experiment,) = read(find(ROOT / "experiments", ["rules"]), [])
    plain = [case for case in experiment.cases if case.name.startswith("fedavg.")]
    run = [case for case in plain if all(results.arms(case)[arm] for arm in ARMS)]
    assert {f"rules/{case.name}" for case in run} == set(tool.ROWS.values())
