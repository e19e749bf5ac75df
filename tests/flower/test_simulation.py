"""The example by `flwr run` on Flower's own simulation, beside our own engine with the same arrivals."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")
pytest.importorskip("ray", reason="Flower's simulation needs Ray, which has no package for this Python")

import safari
from flower.deploy import Federation
from processes import wait_until
from safari.runs import RunFolder, read_checkpoint

ROUNDS = 8
# Everything that has a state of its own: the policy and the server step in the checkpoint, the algorithm's at the
# clients, which Flower keeps between messages.
STATEFUL = {"policy": "rigl", "interval": 2, "client": "scaffold", "step": "fedadam"}
RECIPE = {"preset": "best", "rule": "safari+"}


@pytest.mark.parametrize(
    ("settings", "mask_moves"),
    [
        pytest.param(STATEFUL, True, id="everything with a state"),
        pytest.param(RECIPE, False, id="the recipe", marks=pytest.mark.slow),
    ],
)
def test_the_example_ends_where_our_own_engine_does(settings, mask_moves, tmp_path):
    run = tmp_path / "run"
    with Federation(tmp_path, 10) as federation, federation.explained():
        federation.start_simulation()
        federation.submit(run=str(run), num_server_rounds=ROUNDS, success=0.3, **settings)
        wait_until("all rounds", (run / "summary.json").exists, 400)
    flower = RunFolder.open(run)
    # The same experiment in this process: `config.toml` has all of it.
    config = {**flower.config.to_dict(), "engine": {"name": "reference", "device": "cpu", "threads": 1}}
    safari.run(config, tmp_path / "own")

    (trial,), (own,) = flower.trials(), RunFolder.open(tmp_path / "own").trials()
    lines, expected = trial.records(), own.records()
    same = (
        "round",
        "arrived",
        "missing",
        "stand_ins",
        "loss",
        "top1",
        "train_loss",
        "support",
        "density",
        "churn",
    )
    assert [{n: line[n] for n in same} for line in lines] == [{n: line[n] for n in same} for line in expected]
    lost = sum(len(line["missing"]) for line in lines) / (10 * ROUNDS)
    assert 0.5 < lost < 0.9
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert not mask_moves or sum(line["churn"] > 0 for line in lines) > 2
    model, same_model = (read_checkpoint(t.checkpoint).tensors["model"] for t in (trial, own))
    assert (model == same_model).all()
