"""Mask policies, client algorithms and server steps: the same records on Flower as in the reference engine."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import torch

from engine.kit import world_of
from flower.test_equality import SAME, TABLE
from flower.twin import on_flower, our_loop, own_loop
from safari.engine.parts import rule_of
from safari.engine.reference import run_round
from safari.engine.state import State, initial
from safari.engine.world import World

ROUNDS = 5
POLICIES = [
    {"name": "set", "interval": 2},
    {"name": "rigl", "interval": 2},
    {"name": "sparse-momentum", "interval": 1},
    {"name": "feddst", "interval": 1},
    {"name": "fedrts", "interval": 2, "stop": 1.0},
]


def small(**tables) -> World:
    """Five rounds of six clients, of which some hear nothing and some are not heard."""
    return world_of({**TABLE, "rounds": ROUNDS, "model": {"name": "mlp", "hidden": [8]}, **tables})


def assert_same(world: World, strategy, lines, models, *, bytes_down: bool = True) -> State:
    """Flower's records, models and the server's state against the reference engine's."""
    state = initial(world, rule_of(world.config.arms[0].rule))
    for t, line in enumerate(lines):
        state, record, _ = run_round(world, state)
        assert torch.equal(models[t + 1], state.server.model), f"round {t + 1}"
        assert {name: line[name] for name in SAME} == {name: record[name] for name in SAME}
        assert line["train_loss"] == record["train_loss"]
        assert line["bytes"]["down"] == record["bytes"]["down"]
        up = record["bytes"]["up"]
        # On Flower a frame states its client, round and model, in 20 bytes. In the first round a server that has
        # no data expects another mask where clients work it out.
        worked_out = t == 0 and world.config.policy.name == "static"
        assert worked_out or line["bytes"]["up"] == (up if up is None else up + 20)
    assert state.server.step_state.keys() == strategy.server.step_state.keys()
    for name, tensor in state.server.step_state.items():
        assert torch.equal(strategy.server.step_state[name], tensor), name
    for name, tensor in state.policy.items():
        assert torch.equal(strategy._policy[name], tensor), name
    assert 0 < sum(len(line["missing"]) for line in lines) < ROUNDS * world.config.clients
    return state


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["name"])
def test_a_policy_gives_the_same_records_as_in_the_engine(policy, tmp_path):
    world = small(policy=policy, pruning={"pruner": "mag", "scope": "erk"}, arms=["safari"])
    strategy, lines, models = on_flower(world, own_loop(world), tmp_path / "run")
    assert_same(world, strategy, lines, models)
    assert sum(line["churn"] > 0 for line in lines) > 1
    assert len({line["density"] for line in lines if line["arrived"]}) == 1


@pytest.mark.parametrize(
    "client",
    [
        {"name": "fedprox", "mu": 0.5},
        {"name": "scaffold"},
        {"name": "calibrated"},
        {"name": "masked-loss"},
        {"name": "feddyn"},
        {"name": "fednova"},
        {"name": "dane"},
        {"name": "bvr-l-sgd"},
    ],
    ids=lambda client: client["name"],
)
def test_a_client_algorithm_gives_the_same_records_as_in_the_engine(client, tmp_path):
    world = small(client=client, arms=["drop"])
    strategy, lines, models = on_flower(world, our_loop(world), tmp_path / "run")
    assert_same(world, strategy, lines, models)
