"""A run's folder and the strategies that find it: a restart goes on, a refused one changes nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import json

import torch
from flwr.app import MetricRecord

from flower.kit import NODES, Loopback, good_app, lines_of, net, play
from safari.errors import RunError
from safari.flower import SafariStrategy
from safari.runs import RunFolder


def test_a_restart_goes_on_where_it_was_bit_by_bit(tmp_path):
    apps = {30: good_app(), 50: good_app(), 70: good_app()}
    whole = SafariStrategy(net(), 3, run=tmp_path / "whole")
    whole.start(Loopback(apps), num_rounds=4, timeout=0.1)
    first = SafariStrategy(net(), 3, run=tmp_path / "run")
    first.start(Loopback(apps), num_rounds=2, timeout=0.1)
    # A new process knows nothing but the folder; its model starts elsewhere and its nodes have new ids.
    moved = {node + 1000: app for node, app in apps.items()}
    second = SafariStrategy(net(seed=5), 3, run=tmp_path / "run")
    result = second.start(Loopback(moved), num_rounds=4, timeout=0.1)
    assert torch.equal(second.server.model, whole.server.model)
    for name, tensor in whole.server.state.items():
        assert torch.equal(second.server.state[name], tensor)
    expected, found = lines_of(tmp_path / "whole"), lines_of(tmp_path / "run")
    leave = ("nodes", "resumed")
    assert [{k: v for k, v in line.items() if k not in leave} for line in found] == [
        {k: v for k, v in line.items() if k not in leave} for line in expected
    ]
    assert [line["resumed"] for line in found] == [False, False, True, False]
    state = result.arrays.to_torch_state_dict()
    assert torch.equal(state["one.weight"], second.layout.split(whole.server.model)["one.weight"])
    assert "norm.num_batches_tracked" in state


def test_the_average_is_tested_kept_and_found_again(tmp_path):
    config = {"aggregation": {"average": 0.6}}
    tested = []

    def test(number, arrays):
        tested.append((number, second.layout.read(loaded(arrays))))
        return MetricRecord({"accuracy": 0.1 * len(tested), "loss": 1.0})

    def loaded(arrays):
        module = net()
        module.load_state_dict(arrays.to_torch_state_dict())
        return module

    apps = dict.fromkeys(NODES, good_app())
    first = SafariStrategy(net(), 3, config=config, run=tmp_path / "run")
    assert first.averaged is None
    first.start(Loopback(apps), num_rounds=1, timeout=0.1)
    second = SafariStrategy(net(seed=5), 3, config=config, run=tmp_path / "run")
    second.start(Loopback(apps), num_rounds=3, timeout=0.1, evaluate_fn=test, average_fn=test)
    # Of each round the newest model, then the average: the mean of two, then 0.6 of the past.
    assert [number for number, _ in tested] == [2, 2, 3, 3]
    models = [first.layout.read(loaded(first.arrays)), tested[0][1], tested[2][1]]
    torch.testing.assert_close(tested[1][1], (models[0] + models[1]) / 2)
    torch.testing.assert_close(tested[3][1], 0.6 * tested[1][1] + 0.4 * models[2])
    assert torch.equal(second.layout.read(loaded(second.averaged)), tested[3][1])
    lines = lines_of(tmp_path / "run")
    assert [line["top1"] for line in lines] == [None, pytest.approx(0.1), pytest.approx(0.3)]
    assert lines[0]["average"] is None
    assert lines[2]["average"] == {"loss": 1.0, "top1": pytest.approx(0.4), "top5": None}
    whole = SafariStrategy(net(), 3, run=tmp_path / "whole")
    whole.start(Loopback(apps), num_rounds=3, timeout=0.1)
    assert torch.equal(whole.server.model, second.server.model), "it changes nothing else"
    assert whole.averaged is None
    newest = []
    third = SafariStrategy(net(), 3, config=config)
    third.start(Loopback(apps), num_rounds=2, timeout=0.1, evaluate_fn=lambda t, _: newest.append(t))
    assert newest == [0, 1, 2], "who tests the newest model is not given another"
    changed = SafariStrategy(net(), 3, run=tmp_path / "run")
    with pytest.raises(RunError, match=r"aggregation\.average was 0\.6 and is 0\.0"):
        changed.start(Loopback(apps), num_rounds=4, timeout=0.1)


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


REFUSED = [
    ({"config": {"pruning": {"sparsity": 0.9}}}, r"pruning\.sparsity was 0\.8 and is 0\.9"),
    ({"module": torch.nn.Linear(3, 3)}, "is of another model"),
    ({"rule": "drop"}, r"run holds a run of safari; rule is drop: choose another run$"),
    ({"config": {"seed": 4}}, r"run holds a run of seed 0; seed is 4: choose another run$"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_a_refused_start_changes_nothing_on_disk(options, message, tmp_path):
    def killed(number, arrays):
        if number == 3:
            raise SystemExit

    apps = dict.fromkeys(NODES, good_app())
    first = SafariStrategy(net(), 3, config={"checkpoint": {"every": 2}}, run=tmp_path / "run")
    with pytest.raises(SystemExit):
        first.start(Loopback(apps), num_rounds=6, timeout=0.1, evaluate_fn=killed)
    # A record beyond the checkpoint, as a process leaves it that dies between two of them.
    rounds = tmp_path / "run/trials/safari/seed-0/rounds.jsonl"
    rounds.write_text(rounds.read_text() + json.dumps({**lines_of(tmp_path / "run")[-1], "round": 3}) + "\n")
    before = contents(tmp_path / "run")
    folders = sorted((tmp_path / "run").rglob("*"))
    again = {"module": net(), "clients": 3, "run": tmp_path / "run", **options}
    with pytest.raises(RunError, match=message):
        SafariStrategy(**again).start(Loopback(apps), num_rounds=2, timeout=0.1)
    assert contents(tmp_path / "run") == before
    assert sorted((tmp_path / "run").rglob("*")) == folders


def test_a_run_of_our_own_engine_is_refused_and_kept(tmp_path):
    import safari

    tables = {"rounds": 3, "clients": 5, "model": {"name": "mlp", "hidden": [4]}, "wire": {"every": 0}}
    safari.run({**tables, "arms": ["drop", "safari"]}, tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(RunError, match="is of another model"):
        SafariStrategy(net(), 3, run=tmp_path / "run").start(Loopback({}), num_rounds=5, timeout=0.1)
    assert contents(tmp_path / "run") == before
    # One that was stopped before its first checkpoint.
    (tmp_path / "run/trials/safari/seed-0/checkpoint.safetensors").unlink()
    before = contents(tmp_path / "run")
    with pytest.raises(RunError, match="holds a run of another config, which differs in clients, data, "):
        SafariStrategy(net(), 3, run=tmp_path / "run").start(Loopback({}), num_rounds=5, timeout=0.1)
    assert contents(tmp_path / "run") == before


def test_a_start_never_shortens_a_run(tmp_path):
    apps = dict.fromkeys(NODES, good_app())
    first = play(tmp_path, apps, rounds=3)
    before = contents(tmp_path / "run")
    assert play(tmp_path, apps, rounds=1) == first
    assert contents(tmp_path / "run") == before
    assert RunFolder.open(tmp_path / "run").config.rounds == 3
    assert json.loads((tmp_path / "run/summary.json").read_text())["rounds"] == 3
    assert len(play(tmp_path, apps, rounds=4)) == 4
    assert RunFolder.open(tmp_path / "run").config.rounds == 4


def test_a_folder_in_which_nothing_was_done_takes_the_new_setting(tmp_path):
    def raises(number, arrays):
        raise RuntimeError("a bug in the app")

    apps = dict.fromkeys(NODES, good_app())
    first = SafariStrategy(net(), 3, run=tmp_path / "run")
    with pytest.raises(RuntimeError):
        first.start(Loopback(apps), num_rounds=1, timeout=0.1, evaluate_fn=raises)
    (line,) = play(tmp_path, apps, config={"pruning": {"sparsity": 0.5}}, rule="drop")
    assert line["density"] == pytest.approx(0.5, abs=0.02)
    found = RunFolder.open(tmp_path / "run").config
    assert (found.pruning.sparsity, found.arms[0].name) == (0.5, "drop")


def test_a_finished_run_is_left_alone(tmp_path):
    first = play(tmp_path, dict.fromkeys(NODES, good_app()))
    assert play(tmp_path, dict.fromkeys(NODES, None)) == first
