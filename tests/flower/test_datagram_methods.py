"""Client algorithms over datagrams: what they need beside the model comes with the broadcast, all of it or nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

from pathlib import Path

import torch

from engine.kit import world_of
from flower.test_datagrams import bad_network, datagrams
from flower.test_equality import SAME, TABLE
from flower.twin import on_flower, our_loop
from safari.engine.reference import run_round
from safari.engine.state import initial
from safari.errors import SafariError
from safari.flower import Datagrams, SafariStrategy
from safari.flower.arrays import (
    beside_of,
    chain_record,
    frame_of,
    frame_record,
    pack_broadcast,
    unpack_broadcast,
    with_beside,
)
from safari.net.path import Conditions
from safari.runs import RoundRecord

# The preset `best`, at a small scale.
BEST = {
    "rounds": 2,
    "clients": 4,
    "pruning": {"pruner": "rand", "scope": "erk"},
    "local": {"steps": 2, "batch": 8, "optimiser": "sgd", "lr": 0.015, "schedule": "cosine", "final": 0.05},
    "client": {"name": "mime", "momentum": 0.8, "second": 0.999, "strength": 1.0},
    "aggregation": {"average": 0.9},
    "uplink": {"name": "perfect"},
    "arms": ["safari+"],
}
STEPS = {"every": 1, "values": "step", "ratio": 80.0}


@pytest.mark.parametrize(
    ("wire", "hidden"), [({"every": 1}, 128), (STEPS, 1200)], ids=["exact", "steps of ratio 80"]
)
def test_the_recipe_over_lossy_datagrams_is_the_simulator_on_the_same_arrivals(wire, hidden, tmp_path):
    table = TABLE | BEST | {"wire": wire, "model": {"name": "mlp", "hidden": [hidden]}}
    server = datagrams(repair=1.0)
    with bad_network(Conditions(loss=0.3), Conditions(loss=0.3), server):
        strategy, lines = same_as_simulated(table, tmp_path, server)
    packets = [(b["packets"], b["of"]) for line in lines for b in line["blocks"].values()]
    assert sum(came for came, _ in packets) < sum(of for _, of in packets)
    assert any(0 < share < 1 for line in lines for share in line.get("parts", {}).values())
    assert bool((strategy.server.algorithm_state["momentum"] != 0).any())


@pytest.mark.parametrize(
    "client", [{"name": "fedawe"}, {"name": "fedpbc"}], ids=lambda client: client["name"]
)
def test_what_each_client_gets_for_itself_comes_with_the_broadcast(client, tmp_path):
    table = TABLE | {"client": client, "uplink": {"name": "perfect"}, "arms": ["drop"]}
    _, lines = same_as_simulated(table, tmp_path, datagrams())
    assert len({tuple(line["arrived"]) for line in lines}) > 1


@pytest.mark.parametrize(
    ("client", "most"),
    [(BEST["client"], 1), ({"name": "fedavg"}, 1), ({"name": "fedawe"}, 3)],
    ids=["a vector for all", "the model alone", "a row for each"],
)
def test_a_broadcast_is_packed_once_for_all_that_get_the_same(client, most, monkeypatch, tmp_path):
    packed: list[bytes] = []

    def counted(record):
        packed.append(pack_broadcast(record))
        return packed[-1]

    monkeypatch.setattr("safari.flower.datagrams.pack_broadcast", counted)
    table = TABLE | BEST | {"rounds": 3, "clients": 3, "client": client, "arms": ["drop"]}
    world = world_of(table)
    _, lines, _ = on_flower(world, our_loop(world), tmp_path / "run", datagrams=datagrams())
    assert len(lines) == 3
    # Nothing was packed twice, whatever a round's clients got.
    assert len(packed) == len(set(packed))
    assert len(lines) <= len(packed) <= len(lines) * most


def same_as_simulated(
    table: dict, folder: Path, server: Datagrams
) -> tuple[SafariStrategy, list[RoundRecord]]:
    """An experiment over datagrams, found to be that of the reference engine on the same arrivals."""
    world = world_of(table)
    strategy, lines, models = on_flower(world, our_loop(world), folder / "run", datagrams=server)
    (records,) = folder.glob("run/trials/*/seed-0/rounds.jsonl")
    again = world_of(table | {"packets": {"name": "recorded", "file": str(records)}})
    fed = again.federation()
    state = initial(again, fed)
    for t, line in enumerate(lines):
        state, record, _ = run_round(again, fed, state)
        assert torch.equal(models[t + 1], state.model), f"round {t + 1}"
        for name in (*SAME, "train_loss"):
            assert line[name] == record[name], name
        assert line.get("parts") == record.get("parts")
        # With the algorithm's vectors.
        assert line["bytes"]["down"] == pytest.approx(record["bytes"]["down"], abs=1e-6)
    for name, tensor in {**state["rule"], **state["step"]}.items():
        found = {**strategy.server.state, **strategy.server.step_state}[name]
        assert torch.equal(found.nan_to_num(), tensor.nan_to_num()), name
    return strategy, lines


def test_a_broadcast_is_read_as_it_was_written_or_refused():
    parts = {"vector.momentum": b"abc", "vector.größe": b"", "mask": bytes(300)}
    record = with_beside(frame_record(b"frame"), parts)
    data = pack_broadcast(record)
    found = unpack_broadcast(data)
    assert frame_of(found) == b"frame"
    assert beside_of(found) == parts
    assert frame_of(unpack_broadcast(pack_broadcast(frame_record(b"alone")))) == b"alone"
    head = len(data) - len(b"frame")
    for length in range(head):
        with pytest.raises(SafariError, match="the broadcast must"):
            unpack_broadcast(data[:length])
    with pytest.raises(SafariError, match="must name each part once"):
        unpack_broadcast(b"\x02" + b"\x01a\0\0\0\0" * 2)
    with pytest.raises(SafariError, match="datagrams need the model as one frame"):
        pack_broadcast(chain_record([b"a", b"b"]))
