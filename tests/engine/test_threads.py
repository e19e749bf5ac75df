"""A round whose clients and test samples are shared by two threads, against the reference."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import safari
from engine.kit import StopAfter, play, world_of
from engine.test_vectorised import ADAM, BASE, CNN, RESNET, compare, put
from safari import models as models_zoo
from safari.engine.stack import cpu
from safari.engine.stack.thread_pool import ThreadPool
from safari.engine.vectorised import Vectorised
from safari.training import evaluate

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.mark.parametrize("stacked", [1, 2, 16])
@pytest.mark.parametrize("pruner", ["mag", "snip"])
def test_as_the_reference_however_many_are_stacked(monkeypatch, pruner, stacked):
    monkeypatch.setattr(cpu, "MOST_CLIENTS", stacked)
    config = put(BASE, CNN, {"rounds": 4, "pruning": {"pruner": pruner}, "uplink": {"name": "perfect"}})
    assert Vectorised(world_of(config)).chunk == 2 * stacked * cpu.TURNS
    compare(config, near=ADAM, exact=4)


@pytest.mark.parametrize(
    "change",
    [
        RESNET | {"rounds": 1},
        {"clients": 1, "rounds": 2, "partition": {"name": "iid"}},
        {"clients": 7, "uplink": {"name": "bernoulli", "p": 0.3}},
        {"local": {"epochs": 0.4}, "partition": {"name": "dirichlet", "alpha": 0.3}},
    ],
    ids=["resnet", "one client", "now and then one or none", "clients of different sizes"],
)
def test_as_the_reference_in_other_settings(change):
    compare(put(BASE, CNN, change), near=ADAM, exact=8)


def models(config: dict[str, Any]) -> list[torch.Tensor]:
    return [after.model for _, after, _ in play(config)]


def test_two_runs_are_bit_equal():
    config = put(BASE, CNN, {"rounds": 4})
    for one, other in zip(models(config), models(config), strict=True):
        assert torch.equal(one, other)


def test_a_run_in_two_halves_is_bit_equal(tmp_path):

    config = put(BASE, CNN, {"rounds": 5, "checkpoint": {"every": 2}})
    safari.run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        safari.run(config, tmp_path / "halves", [StopAfter(3)])
    assert torch.get_num_threads() == 1
    safari.resume(tmp_path / "halves")
    for name in ("rounds.jsonl", "checkpoint.safetensors"):
        whole, halves = (next((tmp_path / run).rglob(name)) for run in ("whole", "halves"))
        assert whole.read_bytes() == halves.read_bytes()


def test_one_more_client_changes_nothing_for_the_others():
    change = {"partition": {"name": "mine.py:twenty_each"}}
    found = []
    for clients in (6, 7):
        engine = Vectorised(world_of(put(BASE, CNN, change, {"clients": clients})))
        mask = engine.world.mask(engine.world.start, 0, 0).unsqueeze(0)
        trained = engine._train(engine.world.start, mask, range(clients), 0)
        found.append((trained.models, trained.losses))
    (some, losses), (more, more_losses) = found
    torch.testing.assert_close(some, more[:6], rtol=0, atol=1e-6)
    torch.testing.assert_close(losses, more_losses[:6], rtol=0, atol=1e-6)
    assert min(float((a - b).norm()) for a, b in pairwise(more)) > 1e-2, "two clients learned the same"


@pytest.mark.parametrize("model", ["mine.py:dropout", "mine.py:by_vmap", "mine.py:by_loop"])
def test_what_has_something_in_common_is_not_shared(model):
    assert Vectorised(world_of(put(BASE, {"model": {"name": model}})))._pool is None


@pytest.mark.parametrize(("batch", "clients"), [(8, 16), (64, 16), (65, 15), (512, 2), (513, 1), (5000, 1)])
def test_fewer_are_stacked_when_their_inputs_are_large(batch, clients):
    """A digit has 64 numbers, and 2^16 of them go at once."""
    assert Vectorised(world_of(put(BASE, {"local": {"batch": batch}}))).chunk == 2 * clients * cpu.TURNS


@pytest.mark.parametrize(("batch", "count"), [(8, 1), (513, 2)])
def test_torch_may_use_its_own_threads_for_a_single_client_with_much_to_do(monkeypatch, batch, count):
    engine = Vectorised(world_of(put(BASE, {"local": {"batch": batch, "steps": 1}})))
    seen = []
    real = Vectorised._train_stacked
    monkeypatch.setattr(
        Vectorised, "_train_stacked", lambda *args: seen.append(torch.get_num_threads()) or real(*args)
    )
    mask = engine.world.mask(engine.world.start, 0, 0).unsqueeze(0)
    engine._train(engine.world.start, mask, [3], 0)
    engine._train(engine.world.start, mask, [3, 4], 0)
    assert seen == [count, 1, 1]


class Flattens(nn.Module):
    """`view` cannot read pictures by pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 4 * 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).view(len(x), -1))


@pytest.mark.parametrize(
    ("module", "shape", "by_pixel"),
    [
        (models_zoo.cnn((1, 8, 8), 10), (1, 8, 8), True),
        (models_zoo.resnet20((3, 8, 8), 10, width=4), (3, 8, 8), True),
        (Flattens(), (3, 6, 6), False),
        (models_zoo.mlp((5,), 4), (5,), False),
    ],
    ids=["cnn", "resnet", "view", "vectors"],
)
@pytest.mark.parametrize("pool", [None, ThreadPool(2)], ids=["alone", "shared"])
def test_a_model_is_tested_as_its_module_would_be(module, shape, by_pixel, pool):
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(83, *shape, generator=draw), torch.randint(0, 4, (83,), generator=draw)
    tester = cpu.Tester(module, pool, x[:8])
    assert tester._by_pixel == by_pixel
    assert module.training
    expected, found = evaluate(module, x, y, 41), evaluate(tester, x, y, 41)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    # One sample may lie on a border.
    for key in expected.keys() - {"loss"}:
        assert abs(found[key] - expected[key]) <= 1 / len(y)
    assert not module.training
    module.train()
