"""The figures of a run as files."""

from __future__ import annotations

import re
import sys

import pytest

from report.made_up import record
from safari.config import parse
from safari.errors import MissingExtraError
from safari.report import write_figures
from safari.report.gather import arm_looks, read_run, series
from safari.report.style import RULE_LOOKS, colour, dash, for_paper


def test_figures_as_files(tiny, tmp_path):
    names = ["top1", "top5", "loss", "bytes", "masks", "arrivals-drop", "arrivals-safari"]
    # Masks by magnitude: those of all arms are the same, whoever arrives.
    names += ["layers-perfect", "similarity-safari", "classes", "labels"]
    paths = write_figures(tiny, tmp_path / "figures")
    assert [path.name for path in paths] == [f"{name}.{kind}" for name in names for kind in ("png", "svg")]
    assert sorted(tmp_path.glob("figures/*")) == sorted(paths)
    first = paths[0].read_bytes()
    assert first.startswith(b"\x89PNG")
    # 6.0 × 3.3 inches at 150 dots an inch, from the header of the file.
    assert (int.from_bytes(first[16:20]), int.from_bytes(first[20:24])) == (900, 495)


def test_figures_for_a_paper_are_vectors_of_one_column_or_two(tiny, tmp_path):
    with for_paper():
        paths = write_figures(tiny, tmp_path / "paper", ("pdf",))
    assert {path.suffix for path in paths} == {".pdf"}
    widths = {}
    for path in paths:
        box = re.search(rb"/MediaBox \[ 0 0 ([0-9.]+) ([0-9.]+) \]", path.read_bytes())
        widths[path.stem] = float(box[1]) / 72
    # A column of 3.35 inches; masks have panels side by side.
    assert widths["top1"] == pytest.approx(3.35, abs=0.01)
    assert widths["masks"] == pytest.approx(7.0, abs=0.01)


def test_a_rule_looks_the_same_whatever_stands_beside_it(synthetic):
    run = read_run(synthetic({(name, 0): [record(1)] for name in ("drop", "safari")}))
    assert [line.look for line in series([run], "top1")] == [RULE_LOOKS["drop"], RULE_LOOKS["safari"]]
    arms = ["safari", "perfect", {"name": "mine", "rule": "safari"}]
    looks = arm_looks([("run", parse({"arms": arms}))])
    assert (looks["run", "safari"], looks["run", "perfect"]) == (RULE_LOOKS["safari"], RULE_LOOKS["perfect"])
    assert colour(looks["run", "mine"]) == colour(RULE_LOOKS["safari"])
    assert dash(looks["run", "mine"]) != dash(RULE_LOOKS["safari"])
    assert len(set(RULE_LOOKS.values())) == len(RULE_LOOKS), "no two rules look alike"


def test_figures_of_several_runs_do_not_overwrite_each_other(synthetic, tmp_path):
    trials = {("drop", 0): [record(1, top1=None)]}
    runs = [synthetic(trials, folder=name) for name in ("a b", "a$b")]
    (runs[0].path / "clients.json").write_text('{"label_counts": [[1, 2]]}')
    names = [path.name for path in write_figures(runs, tmp_path / "figures") if path.suffix == ".png"]
    assert names == ["masks.png", "a-b-arrivals-drop.png", "a-b-labels.png", "a-b-arrivals-drop-2.png"]


def test_the_average_has_a_figure_where_a_run_keeps_one(synthetic, tmp_path):
    scores = {"top1": 0.5, "top5": 1.0, "loss": 1.0}
    kept = {
        ("drop", 0): [
            record(1, average=scores),
            record(2, top1=None, average=None),
            record(3, average=scores),
        ]
    }
    runs = [
        synthetic(trials, folder=name) for name, trials in (("on", kept), ("off", {("drop", 0): [record(1)]}))
    ]
    names = {path.name for path in write_figures(runs, tmp_path / "both")}
    assert "average-top1.png" in names
    data = [read_run(run) for run in runs]
    with_it, without = series(data, "average_top1")
    assert (with_it.rounds.tolist(), with_it.values.tolist()) == ([1.0, 3.0], [[0.5, 0.5]])
    assert without.rounds.tolist() == []
    assert not (tmp_path / "alone/average-top1.png").exists()
    assert "average-top1.png" not in {path.name for path in write_figures(runs[1], tmp_path / "alone")}


def test_without_matplotlib_it_says_how_to_get_it(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError) as error:
        write_figures(tiny, tmp_path / "figures")
    assert str(error.value) == "figures need matplotlib: pip install 'safari-fl[plots]'"
    assert not (tmp_path / "figures").exists()
