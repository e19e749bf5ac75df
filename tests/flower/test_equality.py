"""The same arrivals through Flower's messages and through our own engine: the same bits."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import torch

from engine.kit import world_of
from flower.twin import on_flower, own_loop
from safari.aggregation import RULES
from safari.config import Plug
from safari.engine.parts import rule_of
from safari.engine.reference import run_round
from safari.engine.state import initial

TABLE = {
    "rounds": 4,
    "clients": 6,
    "model": {"name": "mlp", "hidden": [16]},
    "local": {"steps": 2, "batch": 8},
    "uplink": {"name": "gilbert-elliott", "p": 0.5, "burst": 2.0},
    "downlink": {"name": "bernoulli", "p": 0.8},
    "wire": {"every": 1},
    "engine": {"device": "cpu", "threads": 1},
}
NAMES = [name for name in RULES if not rule_of(Plug(name)).overrides_network]


CASES = [(rule, "mag", "auto") for rule in NAMES]
CASES += [("safari", pruner, "auto") for pruner in ("rand", "snip", "synflow")] + [("safari", "snip", "qsgd")]
# What uploads leave out waits at the clients here, and in the state of the run there.
CASES += [("safari", "snip", "step"), ("drop", "mag", "step")]
SAME = ("arrived", "missing", "stand_ins", "lost", "density", "agreement", "support", "churn", "layers")


@pytest.mark.parametrize(("rule", "pruner", "values"), CASES)
def test_flower_and_the_engine_give_the_same_bits(rule, pruner, values, tmp_path):
    pruning, wire = {"pruner": pruner, "sparsity": 0.8}, {"every": 1, "values": values}
    world = world_of({**TABLE, "pruning": pruning, "wire": wire, "arms": [rule]})
    strategy, lines, models = on_flower(world, own_loop(world), tmp_path / "run")

    fed = world.federation()
    state = initial(world, fed)
    for t in range(4):
        state, record, _ = run_round(world, fed, state)
        assert torch.equal(models[t + 1], state.model)
        assert {name: lines[t][name] for name in SAME} == {name: record[name] for name in SAME}
        assert lines[t]["train_loss"] == record["train_loss"]
        # A client that has never been heard holds any free seat, so that its number may be another's.
        assert len(lines[t]["trained"]) == len(record["trained"])
        assert lines[t]["bytes"]["down"] == record["bytes"]["down"]
        # Beyond the first round both ends expect the same mask in both engines.
        # On Flower a frame states its client, round and model, in 20 bytes; in a simulation nothing goes astray.
        up = record["bytes"]["up"]
        assert lines[t]["bytes"]["up"] == (up if up is None else up + 20) or t == 0
    assert state["rule"].keys() == strategy.server.state.keys()
    for name, tensor in state["rule"].items():
        assert torch.equal(strategy.server.state[name].nan_to_num(), tensor.nan_to_num())
    assert 0 < sum(len(line["missing"]) for line in lines) < 24
