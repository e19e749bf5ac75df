from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import threading

import pytest

import safari
from report.made_up import record
from safari.config import Config, parse
from safari.errors import MissingExtraError, RunError
from safari.report import MLflow, TensorBoard, track, watchers_for
from safari.report.track import numbers_of, parameters_of
from safari.runs import RoundRecord

pytest.importorskip("tensorboard")
pytest.importorskip("mlflow")


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


TINY = {
    "name": "tracked", "rounds": 3, "clients": 4, "arms": ["drop", "safari"], "model": {"name": "mlp"},
    "uplink": {"name": "bernoulli", "p": 0.5}, "evaluation": {"every": 2},
}  # fmt: skip


def scalars(folder):
    """What TensorBoard's own reader finds: `{tag: [(step, value), ...]}`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def mlflow_client(folder, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return MlflowClient(tracking_uri=folder.as_uri())


def mlflow_runs(folder, monkeypatch, name="tracked"):
    """What MLflow's own client finds: `{run's name: (run, {metric: [(step, value), ...]})}`."""
    client = mlflow_client(folder, monkeypatch)
    experiment = client.get_experiment_by_name(name)
    found = {}
    for run in client.search_runs([experiment.experiment_id]):
        metrics = {
            metric: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, metric)]
            for metric in run.data.metrics
        }
        assert run.info.run_name not in found
        found[run.info.run_name] = run, metrics
    return found


def expected(records):
    columns = {}
    for one in records:
        for name, value in numbers_of(one).items():
            columns.setdefault(name, []).append((one["round"], value))
    return columns


def test_a_real_run_in_both(tmp_path, monkeypatch):
    config = parse({**TINY, "track": {"tensorboard": True, "mlflow": str(tmp_path / "ml flow")}})
    watchers = watchers_for(config)
    assert [type(watcher) for watcher in watchers] == [TensorBoard, MLflow]
    safari.run(config, tmp_path / "run", watchers)
    assert "MLFLOW_ALLOW_FILE_STORE" not in os.environ
    safari.resume(tmp_path / "run", watchers_for(config))  # a finished run: nothing may be added

    runs = mlflow_runs(tmp_path / "ml flow", monkeypatch)
    assert sorted(runs) == ["drop/seed-0", "safari/seed-0"]
    for trial in safari.runs.RunFolder.open(tmp_path / "run").trials():
        wanted = expected(trial.records())
        assert [step for step, _ in wanted["test/top1"]] == [2, 3]
        assert [step for step, _ in wanted["network/arrived"]] == [1, 2, 3]
        read = scalars(tmp_path / "run" / "tensorboard" / trial.arm / "seed-0")
        assert {tag: [step for step, _ in points] for tag, points in read.items()} == {
            tag: [step for step, _ in points] for tag, points in wanted.items()
        }
        # Event files hold float32.
        for tag, points in wanted.items():
            assert [value for _, value in read[tag]] == pytest.approx([v for _, v in points], rel=1e-6)
        run, metrics = runs[f"{trial.arm}/seed-0"]
        assert metrics == wanted
        assert run.info.status == "FINISHED"
        assert run.data.params["arm"] == trial.arm
        assert run.data.params["pruning.sparsity"] == "0.8"
        assert run.data.params["uplink.p"] == "0.5"


@pytest.mark.slow
def test_the_database_that_mlflow_shows_by_default(synthetic, tmp_path):
    from mlflow import MlflowClient

    where = f"sqlite:///{tmp_path / 'mlflow.db'}"
    run = synthetic({}, {"rounds": 1, "name": "tracked"})
    tracker = MLflow(where)
    tracker.start(run)
    feed(tracker, run, [typed(1)])
    tracker.stop()
    client = MlflowClient(tracking_uri=where)
    experiment = client.get_experiment_by_name("tracked")
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.info.status == "FINISHED"
    assert logged.data.metrics["mask/support"] == 0.2


def feed(tracker, run, records, arm="drop"):
    trial = run.trial(arm, 0)
    for one in records:
        tracker.round(trial, one)


def typed(number, **changes):
    return RoundRecord.from_json(record(number, **changes))


RECORDS = [typed(i, top1=i / 10) for i in range(1, 8)]


@pytest.mark.parametrize("make", [lambda path: TensorBoard(), lambda path: MLflow(str(path / "ml"))])
def test_resumed_runs_log_nothing_twice_and_leave_nothing_out(make, synthetic, tmp_path, monkeypatch):
    run = synthetic({}, {"rounds": 7, "name": "tracked"})
    before = make(tmp_path)
    before.start(run)
    feed(before, run, RECORDS[:4])
    before.stop()
    if isinstance(before, MLflow):
        assert mlflow_runs(tmp_path / "ml", monkeypatch)["drop/seed-0"][0].info.status == "KILLED"
    # The next process goes back to the checkpoint of round 2, replays it, and computes on from there.
    after = make(tmp_path)
    after.start(run)
    feed(after, run, RECORDS)
    after.stop()
    if isinstance(after, MLflow):
        mlflow_run, read = mlflow_runs(tmp_path / "ml", monkeypatch)["drop/seed-0"]
        assert mlflow_run.info.status == "FINISHED"
    else:
        read = scalars(run.path / "tensorboard" / "drop" / "seed-0")
    assert [step for step, _ in read["test/top1"]] == [1, 2, 3, 4, 5, 6, 7]
    assert [value for _, value in read["test/top1"]] == pytest.approx([r["top1"] for r in RECORDS])


def test_event_files_that_end_in_a_torn_record_are_completed(synthetic):
    run = synthetic({}, {"rounds": 7})
    first = TensorBoard()
    first.start(run)
    feed(first, run, RECORDS[:4])
    first.stop()
    folder = run.path / "tensorboard" / "drop" / "seed-0"
    (events,) = folder.iterdir()
    events.write_bytes(events.read_bytes()[:-7])
    second = TensorBoard()
    second.start(run)
    feed(second, run, RECORDS)
    second.stop()
    read = scalars(folder)
    assert set(read) == set(numbers_of(RECORDS[0]))
    assert all(sorted(step for step, _ in points) == [1, 2, 3, 4, 5, 6, 7] for points in read.values())


def test_mlflow_sends_while_the_run_goes_on_and_waits_for_the_rest(synthetic, tmp_path, monkeypatch):
    run = synthetic({}, {"rounds": 60, "name": "tracked"})
    tracker = MLflow(str(tmp_path / "ml"))
    tracker.start(run)
    feed(tracker, run, [typed(i) for i in range(1, 46)])
    logged, _ = mlflow_runs(tmp_path / "ml", monkeypatch)["drop/seed-0"]
    assert logged.info.status == "RUNNING"
    assert len(mlflow_runs(tmp_path / "ml", monkeypatch)["drop/seed-0"][1]["mask/support"]) == 40
    tracker.stop()
    assert len(mlflow_runs(tmp_path / "ml", monkeypatch)["drop/seed-0"][1]["mask/support"]) == 45


def test_the_callers_active_mlflow_run_is_not_touched(synthetic, tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "own").as_uri())
    try:
        with mlflow.start_run() as active:
            run = synthetic({}, {"rounds": 1, "name": "tracked"})
            tracker = MLflow(str(tmp_path / "ml"))
            tracker.start(run)
            feed(tracker, run, [typed(1)], "drop")
            feed(tracker, run, [typed(1)], "safari")
            tracker.stop()
            assert mlflow.active_run().info.run_id == active.info.run_id
        assert mlflow.get_run(active.info.run_id).data.metrics == {}
    finally:
        mlflow.set_tracking_uri(None)
    assert sorted(mlflow_runs(tmp_path / "ml", monkeypatch)) == ["drop/seed-0", "safari/seed-0"]


def test_another_place_gets_runs_of_its_own(synthetic, tmp_path, monkeypatch):
    run = synthetic({}, {"rounds": 1, "name": "tracked"})
    for place in ("one", "two"):
        tracker = MLflow(str(tmp_path / place))
        tracker.start(run)
        feed(tracker, run, [typed(1)])
        tracker.stop()
    for place in ("one", "two"):
        assert mlflow_runs(tmp_path / place, monkeypatch)["drop/seed-0"][1]["mask/support"] == [(1, 0.2)]


def test_a_long_config_is_cut_to_what_mlflow_takes(synthetic, tmp_path, monkeypatch):
    run = synthetic({}, {"name": "tracked", "rounds": 1, "uplink": {"name": "bernoulli", "p": [0.25] * 3000}})
    tracker = MLflow(str(tmp_path / "ml"))
    tracker.start(run)
    feed(tracker, run, [typed(1)])
    tracker.stop()
    logged, _ = mlflow_runs(tmp_path / "ml", monkeypatch)["drop/seed-0"]
    assert len(parameters_of(run.config)["uplink.p"]) > 6000
    assert len(logged.data.params["uplink.p"]) == 6000


def test_what_mlflow_says_is_passed_on(synthetic, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    tracker = MLflow(str(tmp_path / "ml"))
    with pytest.raises(
        RunError, match=r"^track\.mlflow: MLflow at file://.*/ml says: .*MLFLOW_ALLOW_FILE_STORE"
    ):
        tracker.start(synthetic({}))
    assert os.environ["MLFLOW_ALLOW_FILE_STORE"] == "false"


@pytest.fixture
def silent():
    """A server that takes every connection and never says a word: its address, and who came."""
    came = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen():
            with contextlib.suppress(OSError):
                while True:
                    came.append(server.accept()[0])

        threading.Thread(target=listen, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", came
        server.shutdown(socket.SHUT_RDWR)
    for connection in came:
        connection.close()


def test_a_server_that_never_answers_stops_the_run(silent, tmp_path, monkeypatch):
    address, came = silent
    patience = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    monkeypatch.setattr(track, "MLFLOW_PATIENCE", patience)
    config = parse({**TINY, "track": {"mlflow": address}})
    said = rf"^track\.mlflow: MLflow at {address} says: .*timed out.*; the run can be resumed, also with"
    with pytest.raises(RunError, match=said):
        safari.run(config, tmp_path / "run", watchers_for(config))
    assert len(came) == 2
    assert not patience.keys() & os.environ.keys()
    # As it says: without the server.
    path = tmp_path / "run/config.toml"
    path.write_text(path.read_text().replace(address, ""))
    assert safari.resume(tmp_path / "run")["arms"]["drop"]["seeds"]["0"]["finished"]


def test_patience_is_less_than_mlflows_own_and_the_users_word_stands(silent, synthetic, monkeypatch):
    from mlflow import environment_variables as known

    assert (
        int(track.MLFLOW_PATIENCE["MLFLOW_HTTP_REQUEST_TIMEOUT"]) < known.MLFLOW_HTTP_REQUEST_TIMEOUT.default
    )
    assert all(getattr(known, name).name == name for name in track.MLFLOW_PATIENCE)
    address, came = silent
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(RunError, match="read timeout=1"):
        MLflow(address).start(synthetic({}))
    assert len(came) == 1
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "1"


def test_an_mlflow_that_failed_is_not_asked_again(synthetic, tmp_path):
    run = synthetic({}, {"rounds": 60, "name": "tracked"})
    tracker = MLflow(str(tmp_path / "ml"))
    tracker.start(run)
    feed(tracker, run, [typed(i) for i in range(1, 10)])
    shutil.rmtree(tmp_path / "ml")
    with pytest.raises(RunError, match=r"^track\.mlflow: "):
        feed(tracker, run, [typed(i) for i in range(10, 21)])
    tracker.stop()  # or the same error would take its time once more
    assert not (tmp_path / "ml").exists()


def test_a_broken_file_of_ids_is_named(synthetic, tmp_path):
    run = synthetic({})
    (run.path / "mlflow.json").write_text("[]")
    with pytest.raises(
        RunError, match=r"mlflow\.json does not hold MLflow's run ids; remove it to log into new"
    ):
        MLflow(str(tmp_path / "ml")).start(run)


@pytest.mark.parametrize("make", [TensorBoard, lambda: MLflow("folder")])
def test_a_round_before_the_start_is_refused(make, synthetic):
    with pytest.raises(RunError, match="must be started with a run before it is given rounds"):
        make().round(synthetic({}).trial("drop", 0), typed(1))


def test_nothing_asked_nothing_watches():
    assert watchers_for(Config()) == []


@pytest.mark.parametrize(
    ("library", "track", "message"),
    [
        ("tensorboard", {"tensorboard": True}, r"need tensorboard: pip install 'safari-fl\[tensorboard\]'"),
        ("mlflow", {"mlflow": "runs"}, r"need mlflow: pip install 'safari-fl\[mlflow\]'"),
    ],
)
def test_a_missing_library_is_noticed_before_the_run(monkeypatch, library, track, message):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=message):
        watchers_for(parse({"track": track}))
