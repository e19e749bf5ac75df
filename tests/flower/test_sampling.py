"""Samplings on Flower: the server's own draws, the same as in our engines where it knows the same."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import numpy as np
import torch

from engine.kit import world_of
from flower.kit import Loopback, good_app, lines_of, net
from flower.twin import NODES, on_flower, own_loop
from safari.engine.reference import run_round
from safari.engine.state import initial
from safari.errors import RunError
from safari.federation import cleared
from safari.flower import SafariStrategy
from safari.flower.roster import Roster
from safari.flower.selection import select_drawn
from safari.runs import RunFolder
from safari.sampling import Draw

TABLE = {
    "rounds": 6,
    "clients": 6,
    "cohort": 4,
    "arms": ["safari"],
    "model": {"name": "mlp", "hidden": [16]},
    "local": {"steps": 2, "batch": 8},
    "uplink": {"name": "bernoulli", "p": 0.6},
    "wire": {"every": 0},
    "engine": {"device": "cpu", "threads": 1},
}


def ordered(world) -> Loopback:
    """Nodes in the order of their partitions: one that has no name yet has the seat of its partition, too."""
    nodes = sorted(NODES[: world.config.clients])
    configs = {n: {"partition-id": i, "num-partitions": len(nodes)} for i, n in enumerate(nodes)}
    return Loopback(dict.fromkeys(nodes, own_loop(world)), configs)


@pytest.mark.parametrize("name", ["multinomial", "clustered-similarity"])
def test_flower_and_the_engine_ask_the_same_clients_and_give_the_same_bits(name, tmp_path):
    world = world_of({**TABLE, "sampling": {"name": name}})
    strategy, lines, models = on_flower(world, own_loop(world), tmp_path / "run", grid=ordered(world))
    fed = world.federation(world.rules["safari"])
    state = initial(world, fed)
    for t, line in enumerate(lines):
        state, record, _ = run_round(world, fed, state)
        assert line["arrived"] == record["arrived"]
        # A client that has never been heard holds any free seat, so that its number may be another's.
        assert len(line["missing"]) == len(record["missing"])
        assert sorted(line["shares"].values()) == sorted(record["shares"].values())
        for client in line["arrived"]:
            assert line["shares"][str(client)] == record["shares"][str(client)]
        assert torch.equal(models[t + 1], state.model)
    assert any(len(line["shares"]) < 4 for line in lines), "nobody was drawn twice"
    assert any(line["missing"] for line in lines)
    assert state["sampling"].keys() == strategy.state["sampling"].keys()
    assert all(
        torch.equal(tensor, strategy.state["sampling"][key]) for key, tensor in state["sampling"].items()
    )


def test_a_restart_goes_on_with_what_the_sampling_knew(tmp_path):
    config = {"cohort": 2, "sampling": {"name": "clustered-similarity"}}
    apps = {node: good_app() for node in (30, 50, 70, 90)}
    whole = SafariStrategy(net(), 4, config=config, run=tmp_path / "whole")
    whole.start(Loopback(apps), num_rounds=6, timeout=0.1)
    SafariStrategy(net(), 4, config=config, run=tmp_path / "run").start(
        Loopback(apps), num_rounds=3, timeout=0.1
    )
    second = SafariStrategy(net(seed=5), 4, config=config, run=tmp_path / "run")
    second.start(Loopback(apps), num_rounds=6, timeout=0.1)
    assert torch.equal(second.server.model, whole.server.model)
    for key, tensor in whole.state["sampling"].items():
        assert torch.equal(second.state["sampling"][key], tensor)
    assert [line["shares"] for line in lines_of(tmp_path / "run")] == [
        line["shares"] for line in lines_of(tmp_path / "whole")
    ]
    # A checkpoint of fewer clients grows; one that does not fit is refused.
    more = SafariStrategy(net(), 5, config=config, run=tmp_path / "run")
    more.start(Loopback(apps), num_rounds=7, timeout=0.1)
    assert more.state["sampling"]["updates"].shape == (5, more.layout.parameters)
    assert not more.state["sampling"]["updates"][4].any()
    (trial,) = RunFolder.open(tmp_path / "run").trials()
    saved = trial.load()
    trial.save(type(saved)(saved.round, {**saved.tensors, "sampling.products": torch.zeros(2)}, saved.facts))
    with pytest.raises(RunError, match="sampling"):
        SafariStrategy(net(), 5, config=config, run=tmp_path / "run").start(
            Loopback(apps), num_rounds=8, timeout=0.1
        )


def test_a_newcomer_in_a_seat_does_not_inherit_its_updates(tmp_path):
    config = {"cohort": 2, "sampling": {"name": "clustered-similarity"}}
    strategy = SafariStrategy(net(), 2, config=config, run=tmp_path / "run", patience=0)
    grid = Loopback({30: good_app(), 50: good_app()}, {30: {"safari-id": "a"}, 50: {"safari-id": "b"}})
    strategy.start(grid, num_rounds=2, timeout=0.1)
    old = strategy.state["sampling"]["updates"].clone()
    assert old.any(1).all()
    again = SafariStrategy(net(), 2, config=config, run=tmp_path / "run", patience=0)
    # b is gone for longer than patience, and c sits in its place.
    grid = Loopback({30: good_app(), 60: good_app()}, {30: {"safari-id": "a"}, 60: {"safari-id": "c"}})
    again.start(grid, num_rounds=4, timeout=0.1)
    assert again.roster.names == {"a": 0, "c": 1}
    assert not torch.equal(again.state["sampling"]["updates"][1], old[1])
    known = {"updates": old, "products": (old @ old.T).double()}
    found = cleared(again._fed, again.state.put("sampling", known), [1])["sampling"]
    assert not found["updates"][1].any()
    assert torch.equal(found["updates"][0], old[0])
    assert found["products"].tolist() == [[known["products"][0, 0].item(), 0.0], [0.0, 0.0]]


def test_who_is_drawn_and_away_is_missing_with_its_share():
    roster = Roster(4).admit(7, "0", 0).admit(8, "1", 0).admit(9, "2", 0)
    seen = []

    def draw(weights: np.ndarray) -> Draw:
        seen.append(weights.tolist())
        return Draw((0, 1), (0.75, 0.25))

    # Seat 1 is away, seat 3 was never taken.
    found = select_drawn(roster, [7, 9], 1, draw, [5.0, 6.0, 7.0, 8.0])
    assert seen == [[5.0, 6.0, 7.0, 0.0]]
    assert (found.nodes, found.absent) == ((7,), (1,))
    assert found.shares([0, 1], {0: 7}) == {0: 0.75, 1: 0.25}
    # A node that turns out to sit elsewhere takes its share along; a cohort of others has none.
    assert found.shares([1, 3], {3: 7}) == {1: 0.25, 3: 0.75}
    assert found.shares([2], {2: 9}) is None
    # Nobody is there.
    assert select_drawn(Roster(2), [], 1, draw, [1.0, 1.0]).nodes == ()
