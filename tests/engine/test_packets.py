"""Uploads in packets in the engines: the same parts in both, nothing changed where nothing is lost, resumable."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import safari
from engine.kit import SMALL, StopAfter, play, records, world_of
from safari.errors import ConfigError
from safari.rounds.beside import wire_layout

BIG = {**SMALL, "model": {"name": "mlp", "hidden": [64]}, "rounds": 4, "uplink": {"name": "perfect"}}
LOSSY = {"name": "lossy", "loss": 0.3, "size": 200}


def both(config):
    return [
        records({**config, "engine": {**config["engine"], "name": name}})
        for name in ("reference", "vectorised")
    ]


@pytest.mark.parametrize(
    ("rule", "pruner"), [("drop", "mag"), ("safari", "snip"), ("safari+", "mag"), ("mifa", "snip")]
)
def test_both_engines_see_the_same_parts(rule, pruner):
    reference, vectorised = both({**BIG, "packets": LOSSY, "arms": [rule], "pruning": {"pruner": pruner}})
    for one, other in zip(reference, vectorised, strict=True):
        assert one["parts"] == other["parts"]
        assert len(one["parts"]) == 5
        assert one["arrived"] == other["arrived"] == [0, 1, 2, 3, 4]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert one["bytes"] == other["bytes"]
        assert one["density"] == other["density"]
    shares = [share for record in reference for share in record["parts"].values()]
    assert np.mean(shares) == pytest.approx(0.7, abs=0.08)


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_where_no_packet_is_lost_everything_is_as_without_packets(engine):
    config = {**BIG, "engine": {**BIG["engine"], "name": engine}, "uplink": {"name": "bernoulli", "p": 0.5}}
    plain = [after.model for _, after, _ in play(config)]
    packets = [after.model for _, after, _ in play({**config, "packets": {"name": "lossy", "loss": 0.0}})]
    assert all(torch.equal(a, b) for a, b in zip(plain, packets, strict=True))


def test_whole_models_blocks_and_erasure_codes():
    def run(**options):
        return records({**BIG, "packets": {**LOSSY, **options}, "wire": {"every": 1}})

    whole, blocks = run(recover="whole"), run(recover="blocks")
    # About 30 packets: 0.7 to the power of 30.
    assert all(record["lost"] and record["arrived"] == [] for record in whole)
    assert all("parts" not in record for record in whole)
    assert all(not record["lost"] for record in blocks)
    fec = run(recover="fec", repair=0.8)
    assert all(record["arrived"] == [0, 1, 2, 3, 4] and "parts" not in record for record in fec)
    # Bytes that are sent count, whatever arrives.
    assert fec[0]["bytes"]["up"] == pytest.approx(1.8 * blocks[0]["bytes"]["up"], rel=0.05)
    assert whole[0]["bytes"]["up"] == blocks[0]["bytes"]["up"] > 0


def test_what_does_not_come_is_not_seen_and_the_perfect_arm_loses_nothing():
    config = {**BIG, "packets": {"name": "lossy", "loss": 1.0}}
    assert all(record["lost"] for record in records(config))
    assert all(
        not record["lost"] and "parts" not in record for record in records({**config, "arms": ["perfect"]})
    )


def test_a_client_that_the_uplink_stops_sends_no_packets():
    config = {**BIG, "packets": LOSSY, "uplink": {"name": "bernoulli", "p": [1, 0, 1, 1, 1]}}
    for record in records(config):
        assert record["missing"] == [1]
        assert set(record["parts"]) == {"0", "2", "3", "4"}
        assert "1" in record["stand_ins"]


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(tmp_path, engine):
    config = {
        **BIG, "rounds": 6, "packets": {**LOSSY, "burst": 3}, "wire": {"every": 4, "values": "step"},
        "checkpoint": {"every": 1}, "engine": {**BIG["engine"], "name": engine},
    }  # fmt: skip
    safari.run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        safari.run(config, tmp_path / "stopped", [StopAfter(3)])
    safari.resume(tmp_path / "stopped")
    rounds = "trials/safari/seed-0/rounds.jsonl"
    lines = [(tmp_path / name / rounds).read_text() for name in ("whole", "stopped")]
    assert lines[0] == lines[1]
    assert json.loads(lines[0].splitlines()[-1])["parts"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"packets": {"name": "lossy", "loss": 2}}, "packets: loss must lie between 0 and 1, got 2"),
        (
            {"packets": {"name": "lossi"}},
            r"packets.name must be one of lossy, none, recorded; got 'lossi' \(did you mean",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(change, problem):
    with pytest.raises(ConfigError, match=problem):
        world_of({**BIG, **change})


def arrivals(path, *rounds):
    """A file of records in which these ranges of each client's model arrived."""
    lines = [
        {
            "round": t, "arrived": [int(c) for c, ranges in blocks.items() if ranges], "lost": not any(blocks.values()),
            "blocks": {client: {"ranges": ranges} for client, ranges in blocks.items()},
        }
        for t, blocks in enumerate(rounds, 1)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"name": "recorded", "file": str(path)}


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_arrivals_of_a_network_are_replayed_number_by_number(tmp_path, engine):
    size = world_of(BIG).layout.size
    half = size // 2
    whole, first, last = [[0, size]], [[0, half]], [[half, size - half]]
    packets = arrivals(
        tmp_path / "rounds.jsonl",
        {"0": whole, "1": first, "2": last, "3": [], "4": [[0, 1], [5, 2]]},
        {"0": [], "1": []},
        dict.fromkeys("01234", whole),
    )
    config = {**BIG, "rounds": 3, "packets": packets, "engine": {**BIG["engine"], "name": engine}}
    found = records(config)
    assert [record["arrived"] for record in found] == [[0, 1, 2, 4], [], [0, 1, 2, 3, 4]]
    assert found[0]["parts"] == pytest.approx({"1": half / size, "2": 1 - half / size, "4": 3 / size})
    assert found[1]["lost"]
    assert "parts" not in found[2]
    with pytest.raises(ConfigError, match="rounds must be at most the 3 that packets has, got 4"):
        world_of({**config, "rounds": 4})


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_the_residual_of_what_was_lost_waits_for_the_next_upload(tmp_path, engine):
    world = world_of(BIG)
    size, trained = world.layout.size, world.layout.parameters
    config = {**BIG, "rounds": 1, "wire": {"values": "step"}, "engine": {**BIG["engine"], "name": engine}}
    packets = arrivals(tmp_path / "rounds.jsonl", {"0": [[0, size]], "1": [[100, 900]], "2": []})
    ((_, whole, _),) = play(config)
    ((_, parts, _),) = play({**config, "packets": packets})
    came = torch.zeros(size, dtype=torch.bool)
    came[wire_layout(world.layout).positions(100, 900)] = True
    assert bool((whole["wire"]["residual"][1] != 0).any())
    assert torch.equal(parts["wire"]["residual"][0], whole["wire"]["residual"][0])
    assert torch.equal(
        parts["wire"]["residual"][1], torch.where(came[:trained], whole["wire"]["residual"][1], 0.0)
    )
    assert not bool(parts["wire"]["residual"][2:].any())


@pytest.mark.parametrize("client", ["scaffold", "feddyn", "fednova", "dane", "bvr-l-sgd"])
def test_algorithms_that_send_more_than_a_model_are_refused_before_the_run(client):
    with pytest.raises(ConfigError, match=r"packets.name must be 'none' where clients send something beside"):
        world_of({**BIG, "packets": LOSSY, "client": {"name": client}})


@pytest.mark.parametrize("policy", ["rigl", "sparse-momentum", "fedrts"])
def test_a_policy_that_votes_is_refused_before_the_run(tmp_path, policy):
    config = {**BIG, "packets": LOSSY, "policy": {"name": policy, "interval": 2}}
    with pytest.raises(
        ConfigError, match=rf"packets.name must be 'none' .*: client fedavg, policy {policy}$"
    ):
        safari.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_arms_in_which_nothing_is_lost_send_what_they_like():
    up = {"packets": LOSSY, "client": {"name": "scaffold"}}
    assert records({**BIG, **up, "arms": ["perfect"]})
    with pytest.raises(ConfigError, match=r"packets.name must be 'none' "):
        world_of({**BIG, **up, "arms": ["perfect", "drop"]})


@pytest.mark.parametrize("policy", ["static", "set", "feddst", "early-bird"])
def test_a_policy_without_votes_goes_together_with_packets(policy):
    options = {} if policy in ("static", "early-bird") else {"interval": 2}
    found = records({**BIG, "packets": LOSSY, "policy": {"name": policy, **options}})
    assert all(record["parts"] for record in found)


OWN = """
import dataclasses
from safari.pruning import POLICIES

def quiet(*, interval: int = 10):
    return dataclasses.replace(POLICIES["rigl"](interval=interval), votes=False)
"""


def test_an_own_policy_that_does_not_say_that_it_votes_is_refused_where_it_votes(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    config = {**BIG, "packets": LOSSY, "policy": {"name": f"{tmp_path}/own.py:quiet", "interval": 2}}
    world_of(config)
    with pytest.raises(ConfigError, match=r"packets.name must be 'none' .*own.py:quiet$"):
        records(config)
