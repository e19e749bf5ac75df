"""Masks in a run: which weights stay, freeze, or may never come back."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.kit import SMALL, play, records, world_of, write_trace
from safari.pruning import compute_mask
from safari.seeds import torch_generator


def supports(config):
    world = world_of(config)
    return [after.model[world.layout.prunable] != 0 for _, after, _ in play(config)]


@pytest.mark.parametrize("pruner", ["rand", "mag", "synflow"])
def test_without_data_the_mask_is_the_same_for_all_and_freezes_after_the_first_round(pruner):
    config = {**SMALL, "arms": ["drop"], "uplink": {"name": "perfect"}, "pruning": {"pruner": pruner}}
    found = records(config)
    assert [r["agreement"] for r in found] == [1.0] * 5
    assert found[0]["churn"] == pytest.approx(0.8, abs=0.001)
    assert [r["churn"] for r in found[1:]] == [0.0] * 4
    kept = round(0.2 * 592)
    assert [r["support"] for r in found] == [kept / 592] * 5
    assert [r["density"] for r in found] == [kept / 592] * 5
    frozen = supports(config)
    assert all(torch.equal(frozen[0], later) for later in frozen)


@pytest.mark.parametrize("pruner", ["snip", "grasp"])
def test_with_data_clients_disagree_and_the_support_only_shrinks(pruner):
    config = {**SMALL, "arms": ["drop"], "rounds": 8, "pruning": {"pruner": pruner}}
    found = records(config)
    assert found[0]["agreement"] < 0.9
    shrinking = supports(config)
    assert all(bool((before | ~after).all()) for before, after in itertools.pairwise(shrinking))
    assert [r["support"] for r in found] == [float(s.double().mean()) for s in shrinking]
    assert found[-1]["support"] < found[0]["support"]
    for record in found:
        assert record["density"] == round(0.2 * 592) / 592, "each client keeps exactly its budget"


def test_layers_are_recorded_by_name():
    found = records({**SMALL, "arms": ["drop"], "uplink": {"name": "perfect"}})
    world = world_of(SMALL)
    for (_, after, _), record in zip(
        play({**SMALL, "arms": ["drop"], "uplink": {"name": "perfect"}}), found, strict=True
    ):
        parts = world.layout.split(after.model)
        assert record["layers"] == {
            name: pytest.approx(float((parts[name] != 0).double().mean()), abs=1e-6)
            for name in ("1.weight", "3.weight")
        }


def test_churn_is_recorded_by_layer_where_something_changed():
    config = {**SMALL, "arms": ["drop"], "rounds": 4, "pruning": {"pruner": "snip"}}
    for (before, after, _), record in zip(play(config), records(config), strict=True):
        was, now = (world_of(SMALL).layout.split(s.model) for s in (before, after))
        expected = {
            name: float(((was[name] != 0) ^ (now[name] != 0)).double().mean())
            for name in ("1.weight", "3.weight")
        }
        assert record["layer_churn"] == pytest.approx({k: v for k, v in expected.items() if v}, abs=1e-6)


ZEROS = """
from torch import nn

def net(shape, classes):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes))
    nn.init.zeros_(net[3].weight)
    return net
"""


def test_sparsity_0_trains_all_weights_also_those_that_begin_as_0(tmp_path):
    (tmp_path / "zeros.py").write_text(ZEROS)
    config = {**SMALL, "model": {"name": f"{tmp_path}/zeros.py:net"}, "pruning": {"sparsity": 0.0}}
    world = world_of(config)
    head = world.layout.split(world.start)["3.weight"]
    assert int((head != 0).sum()) == 0
    rounds = list(play(config))
    for _, after, record in rounds:
        assert record["density"] == 1.0
        assert int((world.layout.split(after.model)["3.weight"] != 0).sum()) == head.numel()


def test_a_weight_that_begins_as_0_may_be_kept_in_the_first_round(tmp_path):
    (tmp_path / "zeros.py").write_text(ZEROS)
    config = {**SMALL, "model": {"name": f"{tmp_path}/zeros.py:net"}, "uplink": {"name": "perfect"}}
    config["pruning"] = {"pruner": "rand", "sparsity": 0.5}
    world = world_of(config)
    _, after, record = next(play(config))
    assert record["density"] == 0.5
    trained = (world.layout.split(after.model)["3.weight"] != 0).sum()
    assert 20 < int(trained) < 60, "half of the 80, give or take"


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
@pytest.mark.parametrize("pruner", ["snip", "grasp"])
def test_safari_plus_cuts_nothing_for_good_until_all_were_heard(tmp_path, pruner, engine):
    trace = write_trace(tmp_path / "trace.csv", ["11000", "10100", "10010", "01001", "11000", "10100"])
    config = {**SMALL, "rounds": 6, "arms": ["safari+"], "pruning": {"pruner": pruner}}
    config["uplink"] = {"name": "trace", "file": trace}
    config["engine"] = {**SMALL["engine"], "name": engine}
    world = world_of(config)
    rounds = list(play(config))
    assert [r["support"] for _, _, r in rounds[:3]] == [1.0] * 3
    # In the fourth round the last of the five is heard: what anybody kept stays, the rest is cut.
    _, after, record = rounds[3]
    anybody = after["rule"]["kept"].any(0)
    assert torch.equal(after.model[world.layout.prunable] != 0, anybody[world.layout.prunable])
    assert record["support"] < 0.8
    assert rounds[4][2]["support"] < record["support"]


@pytest.mark.parametrize("pruner", ["rand", "mag", "synflow"])
def test_masks_that_are_the_same_for_all_wait_for_nothing(pruner):
    patient, at_once = (
        [after.model for _, after, _ in play({**SMALL, "arms": [rule], "pruning": {"pruner": pruner}})]
        for rule in ("safari+", {"name": "no-wait", "rule": "safari+", "wait": 0})
    )
    assert all(torch.equal(a, b) for a, b in zip(patient, at_once, strict=True))


@pytest.mark.parametrize("pruner", ["rand", "mag", "synflow"])
def test_while_nothing_arrives_the_first_model_is_scored_once(pruner, monkeypatch, tmp_path):
    scored = []

    def spy(*args):
        scored.append(args[2].clone())
        return compute_mask(*args)

    monkeypatch.setattr("safari.engine.world.compute_mask", spy)
    trace = write_trace(tmp_path / "late.csv", ["000", "000", "000", "100", "000", "011"])
    config = {
        **SMALL, "clients": 3, "rounds": 6, "arms": ["drop"], "pruning": {"pruner": pruner},
        "uplink": {"name": "trace", "file": trace},
    }  # fmt: skip
    supports_of = [after.model != 0 for _, after, _ in play(config)]
    # In the first round, and in the second (within what is not 0). Once a model has arrived, what is left of it is
    # the mask.
    first, start = scored
    assert torch.equal(first, start)
    monkeypatch.undo()
    world = world_of(config)
    assert torch.equal(first, world.start)
    expected = compute_mask(
        world.fresh_module(), world.layout, start, world.pruner, world.budget(3), world.pruning_batch(0, 3),
        torch_generator(world.seed, "pruner"), start != 0,
    )  # fmt: skip
    prunable = world.layout.prunable
    assert torch.equal(supports_of[3][prunable], expected[prunable])
