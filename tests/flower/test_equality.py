"""The same arrivals through Flower's messages and through our own engine: the same bits."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import torch
from flwr.clientapp import ClientApp

from engine.kit import world_of
from flower.kit import Loopback
from safari.aggregation import RULES
from safari.config import Plug
from safari.engine.parts import rule_of
from safari.engine.reference import run_round
from safari.engine.state import initial
from safari.engine.world import World
from safari.flower import SafariStrategy, lossy, sparse
from safari.flower.arrays import dense_record, dense_vector
from safari.runs import RunFolder
from safari.training.local import OPTIMISERS

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


def app_for(world: World) -> ClientApp:
    """A client that trains on the samples that the engine would give it, by an ordinary loop."""
    config = world.config
    links = {
        "uplink": config.uplink.name,
        "downlink": config.downlink.name,
        "uplink_options": config.uplink.options,
        "downlink_options": config.downlink.options,
    }
    app = ClientApp(mods=[lossy(**links, seed=world.seed)])

    def batch(message, context):
        return world.pruning_batch(
            context.node_config["partition-id"], message.content["config"]["safari.round"]
        )

    @app.train()
    @sparse(lambda context: world.fresh_module(), batch=batch)
    def train(model, message, context):
        client, t = context.node_config["partition-id"], message.content["config"]["safari.round"]
        optimizer = OPTIMISERS[config.local.optimiser](
            model.parameters(), config.local.lr, config.local.steps
        )
        losses = []
        model.train()
        for x, y in world.training_batches(client, t):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return {"num-examples": len(world.parts[client]), "train_loss": float(torch.stack(losses).mean())}

    return app


CASES = [(rule, "mag", "auto") for rule in NAMES]
CASES += [("safari", pruner, "auto") for pruner in ("rand", "snip", "synflow")] + [("safari", "snip", "qsgd")]
# What uploads leave out waits at the clients here, and in the state of the run there.
CASES += [("safari", "snip", "step"), ("drop", "mag", "step")]
SAME = ("arrived", "missing", "stand_ins", "lost", "density", "agreement", "support", "churn", "layers")


@pytest.mark.parametrize(("rule", "pruner", "values"), CASES)
def test_flower_and_the_engine_give_the_same_bits(rule, pruner, values, tmp_path):
    pruning, wire = {"pruner": pruner, "sparsity": 0.8}, {"every": 1, "values": values}
    world = world_of({**TABLE, "pruning": pruning, "wire": wire, "arms": [rule]})
    nodes = [901, 17, 404, 333, 58, 600]
    configs = {node: {"partition-id": i, "num-partitions": 6} for i, node in enumerate(nodes)}
    models = {}
    strategy = SafariStrategy(world.module, 6, rule, config=world.config, run=tmp_path / "run")
    strategy.start(
        Loopback(dict.fromkeys(nodes, app_for(world)), configs),
        dense_record(world.layout, world.start),
        num_rounds=4,
        evaluate_fn=lambda t, arrays: models.update({t: dense_vector(arrays, world.layout)}),
    )
    lines = RunFolder.open(tmp_path / "run").trials()[0].records()

    state = initial(world, rule_of(world.config.arms[0].rule))
    for t in range(4):
        state, record, _ = run_round(world, state)
        assert torch.equal(models[t + 1], state.server.model)
        assert {name: lines[t][name] for name in SAME} == {name: record[name] for name in SAME}
        assert lines[t]["train_loss"] == record["train_loss"]
        # A client that has never been heard holds any free seat, so that its number may be another's.
        assert len(lines[t]["trained"]) == len(record["trained"])
        assert lines[t]["bytes"]["down"] == record["bytes"]["down"]
        # Beyond the first round both ends expect the same mask in both engines.
        # On Flower a frame states its client, round and model, in 20 bytes; in a simulation nothing goes astray.
        up = record["bytes"]["up"]
        assert lines[t]["bytes"]["up"] == (up if up is None else up + 20) or t == 0
    assert state.server.state.keys() == strategy.server.state.keys()
    for name, tensor in state.server.state.items():
        assert torch.equal(strategy.server.state[name].nan_to_num(), tensor.nan_to_num())
    assert 0 < sum(len(line["missing"]) for line in lines) < 24
