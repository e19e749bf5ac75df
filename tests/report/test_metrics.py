"""Names, formats and direction come from the run's task: a real run of numbers, and made-up ones of tokens."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

import safari
from report.made_up import record
from safari.config import parse
from safari.report import cells, explain, rows_of, to_rich, write_figures
from safari.report.gather import read_run, series
from safari.report.progress import Progress
from safari.report.track import numbers_of
from safari.runs import RoundRecord, RunFolder, RunMetrics, summarise
from safari.runs.metrics import metrics_text
from safari.tasks import classification, tokens
from safari.view.monitor import Monitor

DATA = '''
import torch

def line():
    """Numbers to be guessed."""
    x = torch.linspace(-1, 1, 120).reshape(30, 4)
    return (x, x.sum(1, keepdim=True)), (x[::3], x[::3].sum(1, keepdim=True))
'''


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A run of regression that was really made, with what was printed meanwhile."""
    folder = tmp_path_factory.mktemp("numbers")
    (folder / "my_data.py").write_text(DATA)
    config = {
        "name": "numbers", "rounds": 4, "clients": 3, "arms": ["drop"], "task": {"name": "regression"},
        "data": {"name": f"{folder}/my_data.py:line"}, "partition": {"name": "iid"},
        "model": {"name": "mlp", "hidden": [4]}, "local": {"batch": 4}, "aggregation": {"average": 0.5},
        "pruning": {"sparsity": 0.5}, "uplink": {"name": "perfect"}, "evaluation": {"last": 2, "target": 5.0},
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    safari.run(config, folder / "run", [Progress(console=console)])
    return RunFolder.open(folder / "run"), console.file.getvalue()


def test_a_run_of_numbers_from_record_to_table(numbers):
    run, printed = numbers
    (trial,) = run.trials()
    lines = [json.loads(line) for line in trial.rounds.read_text().splitlines()]
    assert list(lines[0])[:5] == ["round", "loss", "mae", "rmse", "average"]
    assert list(lines[0]["average"]) == ["loss", "mae", "rmse"]
    summary = summarise(run)
    arm = summary["arms"]["drop"]
    assert arm["mae"]["mean"] == pytest.approx((lines[-1]["mae"] + lines[-2]["mae"]) / 2)
    assert "top1" not in arm
    # Less is better: every error is below 5.
    assert arm["seeds"]["0"]["rounds_to_target"] == 1
    header, body = cells(rows_of({"numbers": summary}))
    assert header[:3] == ["arm", "mean absolute error", "average"]
    assert {"root mean squared error", "loss", "rounds to 5"} <= set(header)
    assert body[0][1] == f"{arm['mae']['mean']:.3f}"
    assert "standard deviation of mean absolute error within those rounds of one run, without" in explain(
        {"numbers": summary}
    )
    assert f"mean absolute error {lines[-1]['mae']:.3f}  loss {lines[-1]['loss']:.3f}" in printed


def test_a_run_of_numbers_in_figures_page_and_trackers(numbers, tmp_path):
    run, _ = numbers
    names = {path.stem for path in write_figures(run, tmp_path / "figures")}
    assert {"mae", "average-mae", "rmse", "loss"} <= names
    assert not names & {"top1", "top5"}
    monitor = Monitor([run])
    monitor.poll()
    (about,) = monitor.describe()["runs"]
    assert (about["metrics"]["score"], about["problems"]) == ("mae", [])
    news, _ = monitor.since({})
    assert all(value > 0 for value in news["0/drop/0"]["columns"]["average_mae"])
    assert monitor.table()["header"][1] == "mean absolute error"
    logged = numbers_of(run.trials()[0].records()[0])
    assert {"test/mae", "test/rmse", "test/loss", "average/mae"} <= set(logged)


def run_of(tmp_path, task, *lines, name="run"):
    run = RunFolder.create(
        tmp_path / name, parse({"rounds": 4, "clients": 3, "arms": ["drop"], "name": name})
    )
    run.write("task.json", metrics_text(RunMetrics.of(task)))
    for number, scores in enumerate(lines, 1):
        line = {key: value for key, value in record(number).items() if key not in ("loss", "top1", "top5")}
        run.trial("drop", 0).append({**line, **scores}, {})
    return run


def spoken(*perplexities):
    return [{"loss": float(np.log(p)), "perplexity": p, "accuracy": 0.25} for p in perplexities]


def test_less_perplexity_is_better(tmp_path):
    run = run_of(tmp_path, tokens(), *spoken(400.0, 30.0, 45.0, 25.5))
    run = RunFolder(
        run.path, parse({"rounds": 4, "clients": 3, "arms": ["drop"], "evaluation": {"target": 31}})
    )
    arm = summarise(run)["arms"]["drop"]["seeds"]["0"]
    assert (arm["rounds_to_target"], arm["rounds_to_stay"]) == (2, 4)
    header, body = cells(rows_of({"demo": summarise(run)}))
    assert header[:2] == ["arm", "perplexity"]
    assert "token accuracy %" in header
    assert body[0][header.index("token accuracy %")] == "25.0"
    assert header[header.index("loss") + 1] == "rounds to 31"


def test_runs_of_different_tasks_are_overlaid(tmp_path):
    one = run_of(tmp_path, tokens(), *spoken(40.0), name="one")
    other = run_of(tmp_path, classification(), {"loss": 1.0, "top1": 0.5, "top5": None}, name="other")
    summaries = {"one": summarise(one), "other": summarise(other)}
    header, body = cells(rows_of(summaries))
    assert header[:3] == ["arm", "perplexity", "top-1 %"]
    assert [line[1:3] for line in body] == [["40.00", "–"], ["–", "50.0"]]
    assert "top-5 %" not in header, "nothing was measured"
    data = [read_run(one, "one"), read_run(other, "other")]
    assert [line.label for line in series(data, "perplexity")] == ["one/drop"]
    stems = {path.stem for path in write_figures([one, other], tmp_path / "figures")}
    assert {"perplexity", "top1", "loss"} <= stems
    assert "top5" not in stems
    narrow = Console(file=io.StringIO(), width=76, color_system=None)
    narrow.print(to_rich(rows_of(summaries), width=76))
    assert "perplexity" in narrow.file.getvalue()
    assert "token accuracy" not in narrow.file.getvalue()


def test_a_damaged_task_file_is_named_on_the_page_and_an_error_elsewhere(tmp_path):
    run = run_of(tmp_path, tokens(), *spoken(40.0))
    (run.path / "task.json").write_text('{"score": "x"}')
    with pytest.raises(safari.SafariError, match=r"task\.json: metrics must be a list"):
        summarise(run)
    monitor = Monitor([run])
    monitor.poll()
    assert monitor.since({})[0]["0/drop/0"]["columns"]["round"] == [1]
    (problem,) = monitor.describe()["runs"][0]["problems"]
    assert problem.startswith("task.json cannot be shown (RunError: task.json: metrics must be")


def test_records_of_any_task_are_rows(tmp_path):
    run = run_of(tmp_path, tokens(), *spoken(40.0, 30.0))
    records = run.trials()[0].records(clients=3)
    assert isinstance(records[0], RoundRecord)
    assert [r.numbers()["perplexity"] for r in records] == [40.0, 30.0]
    assert set(records[0].metrics) == {"loss", "perplexity", "accuracy"}
