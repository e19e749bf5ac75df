"""Clients by the names that their operator gave them, times of day, and all that evaluations found."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import json
import re

from click.testing import CliRunner
from flwr.app import MetricRecord
from flwr.clientapp import ClientApp

from flower.kit import Loopback, Net, good_app, lines_of, net, train_a_bit
from safari.cli import cli
from safari.flower import SafariStrategy, sparse
from safari.runs import RunFolder
from safari.runs.tables import arrivals
from safari.view.trial import TrialLog

NAMES = {30: "berlin-7", 50: "1", 70: 'oslo "west",\x1b[2J'}


def grid_of(app) -> Loopback:
    return Loopback(dict.fromkeys(NAMES, app), {node: {"safari-id": name} for node, name in NAMES.items()})


def test_names_and_times_are_in_records_tables_log_and_page(tmp_path, caplog):
    caplog.set_level("INFO")
    grid = grid_of(good_app())
    grid.configs[70] = {"safari-id": "oslo"}
    strategy = SafariStrategy(net(), 3, run=tmp_path)
    strategy.start(grid, num_rounds=1, timeout=0.1)
    grid.online = [50, 70]
    strategy.start(grid, num_rounds=2, timeout=0.1)
    names = {strategy.roster.names[name]: name for name in ("berlin-7", "1", "oslo")}
    assert names[1] == "1"
    away = strategy.roster.names["berlin-7"]
    assert lines_of(tmp_path)[1]["names"] == {str(seat): name for seat, name in names.items()}
    # One whose name is its number is called by it alone.
    line = re.search(
        r"(\S+Z) \t> berlin-7 \(client (\d)\) is missing: not connected \(stood in for by (.*)\)", caplog.text
    )
    assert line is not None
    assert int(line[2]) == away
    assert line[3] in ("client 1", f"oslo (client {strategy.roster.names['oslo']})")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", line[1])

    run = RunFolder.open(tmp_path)
    assert arrivals(run)["name"] == [names[client] for client in arrivals(run)["client"]]
    log = TrialLog(run.trials()[0], 3)
    log.poll()
    news = log.since(None)
    assert news["names"] == names
    assert len(news["times"]) == 2
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", time) for time in news["times"])
    assert "time" not in news["seconds"]


def test_all_that_evaluations_found_is_in_records_show_and_page(tmp_path):
    """The server finds accuracy, f1 and auc; the clients accuracy and f1; both are kept apart."""
    app = ClientApp()
    app.train()(sparse(Net)(train_a_bit))
    app.evaluate()(sparse(Net)(lambda *_: {"num-examples": 4, "accuracy": 0.25, "f1": 0.125}))

    def test(number, arrays):
        return MetricRecord(
            {"accuracy": 0.5, "f1": 0.375, "auc": 0.625 + number / 100, "round": 7.0, "list": [1.0]}
        )

    strategy = SafariStrategy(net(), 3, run=tmp_path / "run", evaluate=True)
    strategy.start(grid_of(app), num_rounds=2, timeout=0.1, evaluate_fn=test)
    line = lines_of(tmp_path / "run")[-1]
    found = {
        "top1": 0.5,
        "f1": 0.375,
        "auc": 0.645,
        "own_round": 7.0,
        "federated_top1": 0.25,
        "federated_f1": 0.125,
    }
    assert {name: line[name] for name in found} == found
    assert line["round"] == 2
    assert "list" not in line
    run = RunFolder.open(tmp_path / "run")
    log = TrialLog(run.trials()[0], 3, run.metrics)
    log.poll()
    assert log.since(None)["columns"]["auc"] == [0.635, 0.645]
    shown = CliRunner().invoke(cli, ["show", str(tmp_path / "run"), "--json"])
    (arm,) = next(iter(json.loads(shown.stdout).values()))["arms"].values()
    assert arm["auc"]["mean"] == pytest.approx(0.64)
    assert arm["federated_f1"]["mean"] == 0.125
    # The table has a column each.
    table = CliRunner().invoke(cli, ["show", str(tmp_path / "run")]).stdout
    assert "auc" in table
    assert "f1 at the clients" in table


def test_clients_metrics_are_the_scores_where_the_server_does_not_test(tmp_path):
    app = ClientApp()
    app.train()(sparse(Net)(train_a_bit))
    app.evaluate()(sparse(Net)(lambda *_: {"num-examples": 4, "mae": 3.0}))
    SafariStrategy(net(), 3, run=tmp_path, evaluate=True).start(grid_of(app), num_rounds=2, timeout=0.1)
    assert [line["mae"] for line in lines_of(tmp_path)] == [3.0, 3.0]
    metrics = RunFolder.open(tmp_path).metrics
    assert (metrics.score, metrics.main.higher) == ("mae", False)
