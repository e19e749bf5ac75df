"""The figure at the top of the README."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from safari.errors import RunError
from safari.evidence.headline import headline
from safari.report.style import INK

ROOT = Path(__file__).parent.parent.parent


def trial(*top1: float) -> dict:
    rounds = [10 * (k + 1) for k in range(len(top1))]
    return {"top1": top1[-1], "curve": {"round": rounds, "top1": list(top1)}}


CASE = {
    "arms": {
        "perfect": {"seeds": {"0": trial(0.25, 0.5), "1": trial(0.25, 0.75)}},
        "drop": {"seeds": {"0": trial(0.125, 0.25), "1": trial(0.125, 0.25)}},
    }
}


def texts(figure) -> str:
    (axes,) = figure.axes
    return "\n".join([axes.get_title(loc="left"), *(t.get_text() for t in axes.texts)])


def test_lines_are_means_and_names_stand_at_their_ends() -> None:
    figure = headline(CASE, "70 % lost", ["perfect", "drop"])
    (axes,) = figure.axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[25.0, 62.5], [12.5, 25.0]]
    assert axes.lines[0].get_xdata().tolist() == [10.0, 20.0]
    assert "70 % lost" in texts(figure)
    assert "perfect network  62.5 %" in texts(figure)
    assert "dropping the missing  25.0 %" in texts(figure)
    assert axes.get_legend() is None


def test_it_can_show_the_running_average() -> None:
    averaged = trial(0.25, 0.5) | {"average_top1": 0.625}
    averaged["curve"]["average_top1"] = [0.125, 0.625]
    figure = headline({"arms": {"drop": {"seeds": {"0": averaged}}}}, "", ["drop"], "average_top1")
    assert figure.axes[0].lines[0].get_ydata().tolist() == [12.5, 62.5]
    assert "dropping the missing  62.5 %" in texts(figure)
    with pytest.raises(RunError, match=r"^the results of arm 'drop' have no evaluations of average_top1$"):
        headline(CASE, "", ["drop"], "average_top1")


def test_an_arm_that_is_not_there_is_named() -> None:
    with pytest.raises(RunError, match=r"^the results have no arm 'safari\+'; there are perfect, drop$"):
        headline(CASE, "", ["safari+"])


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_headline", ROOT / "tools/make_headline.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tool_writes_light_dark_and_png(tool: ModuleType, tmp_path: Path) -> None:
    book = {"format": "safari-evidence-1", "environments": [], "experiments": {"e": {"cases": {"c": CASE}}}}
    (tmp_path / "results.json").write_text(json.dumps(book))
    paths = tool.draw(
        tmp_path / "results.json", tmp_path / "out", "e", "c", ["perfect", "drop"], "words", "top1"
    )
    assert [path.name for path in paths] == ["headline.svg", "headline-dark.svg", "headline.png"]
    light, dark, png = (path.read_bytes() for path in paths)
    ink = INK.encode()
    assert ink in light
    assert ink not in dark
    assert png.startswith(b"\x89PNG")
    again = tool.draw(
        tmp_path / "results.json", tmp_path / "again", "e", "c", ["perfect", "drop"], "words", "top1"
    )
    assert [path.read_bytes() for path in again] == [light, dark, png]
