"""The chart below a notebook's cell: what it draws, how often, and that names cannot break out of it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import safari
from runs.kit import TINY
from safari.report.live import LiveChart, chart, in_notebook
from safari.runs import CLASSIFICATION


class Cell:
    """Keeps everything that was shown, as a notebook would show the last of it."""

    def __init__(self):
        self.shown: list[str] = []

    def show(self, html):
        self.shown.append(html)
        return self.shown.append


def watched(tmp_path, clock, **settings):
    cell = Cell()
    config = {**TINY, "evaluation": {"every": 1, "last": 4}, **settings}
    safari.run(config, tmp_path / "run", [LiveChart(cell.show, clock)], progress=False, report=False)
    return cell.shown


def test_the_last_picture_has_every_arm_and_round(tmp_path):
    shown = watched(tmp_path, lambda: 0.0, seeds=2)
    assert shown[0] == f"<div>run folder: {tmp_path / 'run'}</div><table></table>"
    picture = ElementTree.fromstring(re.search(r"<svg.*</svg>", shown[-1])[0])
    lines = [line for line in picture.iter("polyline") if line.get("stroke-width")]
    assert [len(line.get("points").split()) for line in lines] == [7] * 4, "two arms, two seeds"
    assert [text.text for text in picture.iter("text")][-2:] == ["drop", "safari"]
    assert re.findall(r"<tr><td>(\w+)</td><td>seed 1</td><td>round 7/7</td><td>top-1 ", shown[-1]) == [
        "drop",
        "safari",
    ]


def test_it_draws_no_oftener_than_it_says(tmp_path):
    assert len(watched(tmp_path / "still", lambda: 0.0)) == 2, "at the start and at the end"
    now = iter(range(10**6))
    assert len(watched(tmp_path / "late", lambda: float(next(now)))) == 2 + 2 * 7


def test_notes_and_refusals_stand_below(tmp_path):
    wild = {**TINY["local"], "lr": 1e30}
    shown = watched(tmp_path, lambda: 0.0, local=wild, uplink={"name": "perfect"})
    assert "<div>note: drop, seed 0, round " in shown[-1]
    assert "updates were refused (client 0: " in shown[-1]


def test_names_are_text():
    points = {("<b>&", 0): [(1, 0.1), (2, 0.9)]}
    picture = chart(points, {"<b>&": 0}, CLASSIFICATION, 0.5)
    texts = [text.text for text in ElementTree.fromstring(picture).iter("text")]
    assert texts == ["10%", "50%", "90%", "round 1", "2", "<b>&"]


def test_nothing_to_draw_is_no_picture():
    assert chart({}, {"drop": 1}, CLASSIFICATION, 0.5) == ""
    assert chart({("drop", 0): [(1, 0.5)]}, {"drop": 1}, CLASSIFICATION, 0.5) == ""
    assert "polyline" in chart({("drop", 0): [(1, 0.5), (2, 0.5)]}, {"drop": 1}, CLASSIFICATION, 0.5)


def test_a_script_is_no_notebook():
    assert not in_notebook()
