"""Tests of the model on the clients: compact, counted, and no second wait for those who are gone."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower.kit import NODES, Loopback, Net, good_app, lines_of, net, train_a_bit
from safari.flower import SafariStrategy, sparse


def sizes(grid: Loopback, kind: str) -> dict[int, list[int]]:
    """Bytes of the models in the messages of each round."""
    found: dict[int, list[int]] = {}
    for m in grid.sent:
        if m.metadata.message_type == kind:
            number = m.content["config"]["server-round"]
            found.setdefault(number, []).append(sum(len(a.data) for a in m.content["arrays"].values()))
    return found


def listening(seen: list) -> ClientApp:
    app = ClientApp()

    def note(kind):
        def look(model, message, context):
            vector = torch.cat([t.reshape(-1) for t in model.state_dict().values() if t.is_floating_point()])
            seen.append((message.content["config"]["server-round"], kind, vector.clone()))
            done = {"num-examples": 4, "accuracy": 0.25}
            return train_a_bit(model, message, context) if kind == "train" else done

        return look

    app.train()(sparse(Net)(note("train")))
    app.evaluate()(sparse(Net)(note("evaluate")))
    return app


def test_a_lossy_download_goes_down_once_for_test_and_training(tmp_path):
    seen: list = []
    grid = Loopback(dict.fromkeys(NODES, listening(seen)))
    strategy = SafariStrategy(net(), 3, download="step", evaluate=True, run=tmp_path)
    strategy.start(grid, num_rounds=4, timeout=0.1)
    tests, trainings = sizes(grid, "evaluate"), sizes(grid, "train")
    # The first model goes out in full; then a test has a frame, and the training after it nothing new.
    assert min(trainings[1]) > 400
    assert all(0 < size < 150 for number in (2, 3, 4) for size in tests[number])
    assert trainings[2] == trainings[3] == trainings[4] == [0, 0, 0]
    lines = lines_of(tmp_path)
    assert [line["bytes"]["down"] for line in lines[1:]] == [0, 0, 0]
    assert [line["evaluation"]["down"] for line in lines] == [sum(tests[t]) // 3 for t in (1, 2, 3, 4)]
    # What is tested after a round is what the next one trains.
    for number in (1, 2, 3):
        (tested, *_) = (v for t, kind, v in seen if (t, kind) == (number, "evaluate"))
        trained = [v for t, kind, v in seen if (t, kind) == (number + 1, "train")]
        assert len(trained) == 3
        kept = [v != 0 for v in trained]
        assert all(torch.equal(v[k], tested[k]) for v, k in zip(trained, kept, strict=True))


def test_an_exact_download_is_as_compact_for_a_test_as_for_training(tmp_path):
    grid = Loopback(dict.fromkeys(NODES, good_app()))
    strategy = SafariStrategy(net(), 3, evaluate=True, run=tmp_path)
    strategy.start(grid, num_rounds=3, timeout=0.1)
    tests, trainings = sizes(grid, "evaluate"), sizes(grid, "train")
    assert tests[1] == trainings[2]
    assert tests[2] == trainings[3]
    assert lines_of(tmp_path)[0]["evaluation"] == {
        "asked": [0, 1, 2],
        "answered": [0, 1, 2],
        "reasons": {},
        "down": float(tests[1][0]),
    }


def test_who_did_not_answer_is_not_asked_to_test(tmp_path):
    grid = Loopback({30: good_app(), 50: None, 70: good_app()})
    strategy = SafariStrategy(net(), 3, evaluate=True, run=tmp_path)
    result = strategy.start(grid, num_rounds=2, timeout=0.1)
    asked = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "evaluate"]
    assert asked == [30, 70, 30, 70]
    assert result.evaluate_metrics_clientapp[2]["accuracy"] == 0.25
    assert [line["evaluation"]["asked"] for line in lines_of(tmp_path)] == [[0, 2], [0, 2]]


def test_clients_that_cannot_test_train_on(tmp_path):
    app = ClientApp()
    app.train()(sparse(Net)(train_a_bit))
    grid = Loopback({30: app, 50: good_app(), 70: good_app()})
    strategy = SafariStrategy(net(), 3, download="step", evaluate=True, run=tmp_path)
    result = strategy.start(grid, num_rounds=3, timeout=0.1)
    lines = lines_of(tmp_path)
    assert all(line["arrived"] == [0, 1, 2] for line in lines)
    assert lines[1]["evaluation"]["answered"] == [1, 2]
    assert "error 2: " in lines[1]["evaluation"]["reasons"]["0"]
    assert result.evaluate_metrics_clientapp[3]["accuracy"] == 0.25
    # The one that could not test gets the frame when it trains.
    assert sorted(sizes(grid, "train")[3])[:2] == [0, 0]
    assert 0 < max(sizes(grid, "train")[3]) < 150


def test_impossible_test_results_are_left_out(tmp_path):
    def answer(value):
        app = ClientApp()
        app.train()(sparse(Net)(train_a_bit))

        @app.evaluate()
        def test(message, context):
            metrics = MetricRecord({"num-examples": value, "accuracy": value})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

        return app

    apps = {30: good_app(), 50: answer(float("nan")), 70: answer(1.7e308)}
    result = SafariStrategy(net(), 3, evaluate=True, run=tmp_path).start(
        Loopback(apps), num_rounds=1, timeout=0.1
    )
    # One of three reports something possible: so its mean would not stand for all.
    assert dict(result.evaluate_metrics_clientapp[1]) == {}
