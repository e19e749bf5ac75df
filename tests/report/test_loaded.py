"""`safari.load`: tables, figures and models of a run, finished, going on or damaged; nothing of it is executed."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pyarrow
import pytest
import torch

import safari
from report.made_up import record
from runs.kit import TINY
from safari.errors import ConfigError, MissingExtraError, RunError
from safari.runs import RunFolder
from safari.runs.tables import TABLES

CONFIG = {
    **TINY,
    "seeds": 2,
    "evaluation": {"every": 2, "last": 4},
    "aggregation": {"average": 0.9},
    "diagnostics": {"every": 3},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("loaded") / "run"
    safari.run(CONFIG, path, progress=False, report=False)
    return path


@pytest.fixture
def copy(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def test_rounds_are_those_of_the_records(finished):
    table = safari.load(finished).rounds()
    records = RunFolder.open(finished).trial("safari", 1).records()
    own = table[(table.arm == "safari") & (table.seed == 1)]
    assert len(table) == 2 * 2 * 7
    assert own["round"].tolist() == [record.round for record in records]
    assert own.top1.dropna().tolist() == [r["top1"] for r in records if r["top1"] is not None]
    assert own.average_top1.notna().sum() == 4
    assert own.arrived.tolist() == [len(record.arrived) for record in records]
    assert own.diagnosis_error.notna().tolist() == [n in (3, 6) for n in range(1, 8)]
    assert (own.seconds >= own.seconds_train).all()


def test_clients_and_arrivals_agree(finished):
    run = safari.load(finished)
    clients, arrivals = run.clients(), run.arrivals()
    assert (clients.asked == 7).all()
    assert (clients.arrived + clients.lost_up + clients.lost_down == clients.asked).all()
    counted = arrivals[arrivals.status == "arrived"].groupby(["arm", "seed", "client"]).size()
    for row in clients.itertuples():
        assert row.arrived == counted.get((row.arm, row.seed, row.client), 0)
    assert clients.samples.notna().tolist() == (clients.seed == 0).tolist()
    stood_in = arrivals[(arrivals.arm == "safari") & arrivals.stand_in.notna()]
    assert len(stood_in) == clients[clients.arm == "safari"].stood_in.sum() > 0
    assert set(stood_in.status) == {"lost_up", "lost_down"}
    assert set(arrivals.share) == {0.0, 1.0}


def test_layers_and_summary(finished):
    run = safari.load(finished)
    layers, summary = run.layers(), run.summary()
    names = json.loads((finished / "model.json").read_text())["layers"]
    assert set(layers.layer) == set(names)
    assert layers.density.between(0, 1).all()
    told = json.loads((finished / "summary.json").read_text())["arms"]
    for row in summary.itertuples():
        assert row.top1 == told[row.arm]["seeds"][str(row.seed)]["top1"]
    assert summary.finished.all()
    assert summary.rounds_to_target.isna().any() or summary.rounds_to_target.min() > 0


def test_a_number_that_does_not_exist_is_nan_also_where_none_does(synthetic):
    found = zip((0.25, None, 0.5), (None, 7, 9), strict=True)
    lines = [
        record(number, top1=top1, bytes={"up": size, "down": None}, stand_ins={}, layers={"fc.weight": 0.2})
        for number, (top1, size) in enumerate(found, 1)
    ]
    run = safari.load(synthetic({("drop", 0): lines}, {"rounds": 3, "arms": ["drop"]}).path)
    rounds, summary = run.rounds(), run.summary()
    assert rounds[["average_top1", "bytes_down", "bytes_up", "top1"]].dtypes.eq("float64").all()
    assert rounds.average_top1.isna().all()
    assert rounds.bytes_up.mean() == 8
    assert summary[["average_top1", "rounds_to_target", "rounds_to_stay"]].dtypes.eq("float64").all()
    assert run.arrivals()[["stand_in", "share"]].dtypes.eq("float64").all()
    assert run.layers().age.dtype == run.clients().samples.dtype == "float64"
    assert run.arrivals().reason.dtype == object, "reasons are texts"
    assert run.columns("summary")["rounds_to_target"] == [None]


@pytest.mark.parametrize("page", ["docs/runs.md", "examples/notebooks/first_run.ipynb"])
def test_the_example_that_compares_arms_works_with_several_seeds(finished, page):
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8").replace('\\"', '"')
    index, columns, values = re.search(
        r'rounds\.pivot_table\(index="(\w+)", columns="(\w+)", values="(\w+)"\)', text
    ).groups()
    rounds = safari.load(finished).rounds()
    compared = rounds.pivot_table(index=index, columns=columns, values=values)
    both = rounds[(rounds.arm == "safari") & (rounds["round"] == 2)].top1
    assert compared.safari[2] == pytest.approx(both.mean())
    assert len(both) == 2


@pytest.mark.parametrize("name", TABLES)
def test_plain_columns_go_into_arrow_as_they_are(finished, name):
    columns = safari.load(finished).columns(name)
    table = pyarrow.table(columns)
    assert table.num_rows == len(columns["arm"]) > 0
    assert table.schema.field("seed").type == pyarrow.int64()


def test_without_pandas_it_says_what_to_install(finished, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    run = safari.load(finished)
    with pytest.raises(MissingExtraError) as error:
        run.rounds()
    assert str(error.value) == (
        "data frames (run.columns('rounds') gives plain lists) need pandas: pip install 'safari-fl[pandas]'"
    )
    assert len(run.columns("rounds")["round"]) == 28


def test_a_run_that_goes_on_has_what_is_there(copy):
    lines = (copy / "trials/drop/seed-0/rounds.jsonl").read_text().splitlines(keepends=True)
    shutil.rmtree(copy / "trials/safari")
    shutil.rmtree(copy / "trials/drop/seed-1")
    (copy / "summary.json").unlink()
    rounds = copy / "trials/drop/seed-0/rounds.jsonl"
    rounds.write_text("".join(lines[:3]) + lines[3][:40])
    run = safari.load(copy)
    assert run.columns("rounds")["round"] == [1, 2, 3]
    assert run.columns("summary")["rounds"] == [3]
    rounds.write_text("".join(lines[:4]))
    assert run.columns("rounds")["round"] == [1, 2, 3, 4], "every call reads again"
    shutil.rmtree(copy / "trials")
    assert run.columns("rounds") == {"arm": [], "seed": [], "round": []}
    assert list(run.rounds()) == ["arm", "seed", "round"]
    with pytest.raises(RunError, match="figure must be one of labels; got 'top1'"):
        run.figure("top1")


def test_old_records_are_read(copy):
    path = copy / "trials/drop/seed-0/rounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for name in ("average", "layer_churn", "trained", "modes", "diagnosis"):
            line.pop(name)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = safari.load(copy)
    old = run.arrivals().query("arm == 'drop' and seed == 0")
    assert set(old.status) == {"arrived", "lost"}
    assert run.layers().query("arm == 'drop' and seed == 0").churn.isna().all()


def test_damaged_lines_are_left_out_and_named(copy):
    path = copy / "trials/drop/seed-0/rounds.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "{oops", *lines[3:]]) + "\n")
    run = safari.load(copy)
    with pytest.warns(UserWarning, match="left out: drop, seed 0: .*line 3"):
        found = run.columns("rounds")
    assert len(found["round"]) == 27


def test_a_record_cannot_blow_up_a_table_or_rename_its_row(copy, monkeypatch):
    path = copy / "trials/drop/seed-0/rounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0] |= {"arm": 1, "seed": 77, "more": {str(number): 0 for number in range(2000)}}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = safari.load(copy)
    with pytest.raises(RunError, match="a table may have at most 2,000 columns; the records have more"):
        run.columns("rounds")
    monkeypatch.setattr("safari.runs.tables.MOST_COLUMNS", 3000)
    found = run.columns("rounds")
    assert (set(found["arm"]), set(found["seed"])) == ({"drop", "safari"}, {0, 1})


def test_numbers_that_no_axis_can_show_are_gaps(copy):
    path = copy / "trials/drop/seed-0/rounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line |= {"top1": 1e308, "loss": -1e308, "train_loss": 1e308, "churn": 1e308, "bytes": {"up": 1e308}}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = safari.load(copy)
    assert run.figures()
    assert repr(run)
    assert run.columns("rounds")["loss"][: len(lines)] == [None] * len(lines)


def test_nothing_of_a_run_is_executed(copy, tmp_path):
    mark = tmp_path / "executed"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\ndef rule():\n    ...\n")
    path = copy / "config.toml"
    text = path.read_text().replace('rule = "drop"', f'rule = "{tmp_path}/evil.py:rule"')
    text = text.replace('name = "mlp"', f'name = "{tmp_path}/evil.py:rule"')
    assert "evil.py" in text
    path.write_text(text)
    run = safari.load(copy)
    for name in TABLES:
        run.columns(name)
    assert run.figures()
    assert run.model("safari").ndim == 1
    assert repr(run)
    assert run._repr_html_()
    assert not mark.exists()


def test_figures_by_name(finished):
    run = safari.load(finished)
    assert {"top1", "average-top1", "masks", "arrivals-drop"} <= set(run.figures())
    assert run.figure().axes[0].get_ylabel() == "top-1 accuracy (%)"
    with pytest.raises(RunError, match=r"figure must be one of .*did you mean 'top1'"):
        run.figure("top-1")


def test_a_figure_that_arms_share_is_named_by_the_first(tiny):
    run = safari.load(tiny.path)
    names = sorted(run.figures())
    assert "layers-perfect" in names
    assert run.figure("layers-perfect")
    for name in ("layers-drop", "layers-safari"):
        with pytest.raises(RunError) as error:
            run.figure(name)
        assert str(error.value) == (
            f"figure must be one of {', '.join(names)}; got {name!r}, which looks the same as "
            "'layers-perfect' and is drawn once, under that name"
        )


def test_models_of_the_newest_checkpoint(finished):
    run = safari.load(finished)
    saved = RunFolder.open(finished).trial("safari", 1).read_checkpoint()
    assert torch.equal(run.model("safari", 1), saved.tensors["model"])
    assert torch.equal(run.model("safari", 1, average=True), saved.tensors["average"])
    for wrong, words in (
        ({}, "arm must be given where there are several: drop, safari"),
        ({"arm": "safary"}, "did you mean 'safari'"),
        ({"arm": "drop", "seed": 7}, "no trial of arm drop and seed 7"),
    ):
        with pytest.raises(RunError, match=words):
            run.model(**wrong)


def test_what_is_no_run_or_no_table(finished, tmp_path):
    with pytest.raises(RunError, match="is not a run's folder"):
        safari.load(tmp_path)
    with pytest.raises(RunError, match=r"table must be one of .*did you mean 'rounds'"):
        safari.load(finished).columns("round")
    (tmp_path / "config.toml").write_text("rounds = 'many'")
    with pytest.raises(ConfigError, match="rounds must be"):
        safari.load(tmp_path)


def test_it_shows_its_table(finished):
    run = safari.load(finished)
    assert repr(run).startswith(f"{finished}\narm")
    assert "<td>safari</td>" in run._repr_html_()
