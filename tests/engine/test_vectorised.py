"""All clients at once against one after the other.

How near? Sums are made in another order, so that a model differs by a few units in the last place after a
round (1e-7), and nets without batch norm stay so near for the rounds played here: their records are
equal, masks, arrivals and stand-ins included. Three things enlarge rounding later on. A ReLU whose input is 0
up to rounding passes a gradient in one engine and not in the other; in a ResNet-20 that happens once in some
hundred steps. Batch norm divides by the spread of a channel, which pruning can make tiny. And Adam divides a
gradient by its own size, g / sqrt(v): where the true gradient is near 0 (a bias before batch norm) it makes a
whole step out of rounding. A reference that starts from a model off by 3e-8 drifts apart from itself just as
fast. Hence the tolerances, relative to the size of the model: 1e-5 for sgd, 1e-3 for Adam, 1e-2 for a ResNet.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import safari
from engine.kit import StopAfter, play, records, world_of
from engine.own_parts import PLUGINS
from safari.cli import cli
from safari.config import parse
from safari.engine import device as device_module
from safari.engine import world as world_module
from safari.engine.state import initial
from safari.engine.vectorised import Vectorised
from safari.report.progress import Progress
from safari.runs import RunFolder
from safari.toml import to_toml

BASE: dict[str, Any] = {
    "rounds": 8,
    "clients": 6,
    "arms": ["safari"],
    "model": {"name": "mlp", "hidden": [16]},
    "pruning": {"batch": 16},
    "local": {"steps": 3, "batch": 8, "lr": 0.01},
    "uplink": {"name": "bernoulli", "p": 0.6},
    "evaluation": {"every": 3},
    "engine": {"device": "cpu", "threads": 1},
}
CNN = {"model": {"name": "cnn", "width": 4}}
RESNET = {
    "rounds": 3,
    "clients": 4,
    "data": {"name": "mine.py:pictures"},
    "model": {"name": "resnet20", "width": 4},
    "local": {"augment": "crop-flip", "lr": 0.001},
}
EXACT = (
    "round", "trained", "arrived", "missing", "refused", "stand_ins", "lost", "density", "agreement",
    "support", "churn", "layers",
)  # fmt: skip
SGD, ADAM, DEEP = 1e-5, 1e-3, 1e-2


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PLUGINS)
    return tmp_path


def put(base: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    """Tables with changes put in; what names a plug-in is replaced whole."""
    out = dict(base)
    for change in changes:
        for key, value in change.items():
            merges = isinstance(value, dict) and "name" not in value and isinstance(out.get(key), dict)
            out[key] = {**out[key], **value} if merges else value
    return out


def engine(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {**config, "engine": {**config["engine"], "name": name}}


def compare(config: dict[str, Any], near: float, exact: int) -> list[dict[str, Any]]:
    """Play both engines; records equal for `exact` rounds, models within `near` of their size throughout."""
    both = [play(engine(config, name)) for name in ("reference", "vectorised")]
    found = []
    for t, ((_, one, theirs), (_, other, ours)) in enumerate(zip(*both, strict=True)):
        expected, model = one.model, other.model
        assert float((model - expected).norm()) <= near * float(expected.norm()), f"round {t}"
        if t < exact:
            assert {key: ours[key] for key in EXACT} == {key: theirs[key] for key in EXACT}
            assert torch.equal(model == 0, expected == 0), f"round {t}: another support"
        for key in ("loss", "train_loss"):
            if theirs[key] is None:
                assert ours[key] is None
            else:
                assert math.isclose(ours[key], theirs[key], rel_tol=max(10 * near, 1e-5)), f"round {t}: {key}"
        assert (ours["top1"] is None) == (theirs["top1"] is None)
        found.append(ours)
    return found


@pytest.mark.parametrize("pruner", ["rand", "mag", "snip", "grasp", "synflow"])
@pytest.mark.parametrize("model", [{}, CNN], ids=["mlp", "cnn"])
@pytest.mark.parametrize(("optimiser", "lr"), [("sgd", 0.5), ("adam", 0.01)])
def test_every_pruner_and_optimiser(model, pruner, optimiser, lr):
    change = {"pruning": {"pruner": pruner}, "local": {"optimiser": optimiser, "lr": lr}}
    compare(put(BASE, model, change), near=SGD if optimiser == "sgd" else ADAM, exact=8)


@pytest.mark.parametrize(
    "change",
    [
        {"arms": ["perfect"]},
        {"arms": ["drop"]},
        {"local": {"augment": "crop-flip"}},
        {"local": {"epochs": 0.4}, "partition": {"name": "dirichlet", "alpha": 0.3}},
        {"cohort": 4},
        {"downlink": {"name": "bernoulli", "p": 0.6}},
        {"aggregation": {"weights": "samples"}, "partition": {"name": "dirichlet", "alpha": 0.5}},
        {"clients": 40, "rounds": 4},
        {"uplink": {"name": "lost"}, "rounds": 2},
        {"pruning": {"sparsity": 0.0}},
    ],
    ids=lambda change: "+".join(change),
)
@pytest.mark.parametrize("pruner", ["mag", "snip"])
def test_every_setting(change, pruner):
    found = compare(put(BASE, CNN, {"pruning": {"pruner": pruner}}, change), near=ADAM, exact=8)
    if "local" in change and "epochs" in change["local"]:
        world = world_of(put(BASE, change))
        assert len({world.steps(client) for client in range(6)}) > 2, "the clients were even"
    if "uplink" not in change:
        assert any(record["arrived"] for record in found)


@pytest.mark.parametrize(("optimiser", "lr"), [("sgd", 0.05), ("adam", 0.001)])
@pytest.mark.parametrize("pruner", ["rand", "mag", "snip", "grasp", "synflow"])
def test_a_narrow_resnet(pruner, optimiser, lr):
    """One ReLU on the other side of 0 changes a gradient by 1e-3 of its size; see above."""
    change = {"pruning": {"pruner": pruner}, "local": {"optimiser": optimiser, "lr": lr}}
    compare(put(BASE, RESNET, {"rounds": 1}, change), near=ADAM, exact=1)
    if pruner in ("rand", "mag"):
        compare(put(BASE, RESNET, change), near=DEEP, exact=3)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("dropout", "layers"),
        ("frozen", "layers"),
        ("by_vmap", "vmap"),
        ("restless", "vmap"),
        ("by_loop", "loop"),
        ("sometimes", "loop"),
    ],
)
def test_modules_of_users_each_by_its_way(name, way):
    config = put(BASE, {"model": {"name": f"mine.py:{name}"}, "pruning": {"pruner": "snip"}})
    assert Vectorised(world_of(config)).stack.way == way
    compare(config, near=ADAM, exact=8)


@pytest.mark.parametrize("masks_gradient", [True, False])
def test_the_loop_is_the_reference_to_the_bit(masks_gradient):
    pruning = {"pruner": "snip", "masks_gradient": masks_gradient}
    config = put(BASE, {"model": {"name": "mine.py:by_loop"}, "pruning": pruning})
    assert records(engine(config, "vectorised")) == records(engine(config, "reference"))


def test_an_iterative_pruner_on_a_score_that_can_be_stacked():
    compare(put(BASE, {"pruning": {"pruner": "mine.py:gently"}, "rounds": 4}), near=ADAM, exact=4)


def test_evaluation_finds_the_test_samples_as_they_were():
    config = put(
        BASE, {"model": {"name": "mine.py:restless"}, "uplink": {"name": "lost"}, "evaluation": {"every": 1}}
    )
    for name in ("reference", "vectorised"):
        losses = [record["loss"] for record in records(engine(config, name))]
        assert len(set(losses)) == 1, "the model never changed, and so must its loss"


def test_bfloat16_is_near():
    """8 bits: a gradient is off by some percent, and Adam makes whole steps of those that are near 0."""
    config = put(BASE, CNN, {"rounds": 4})
    exact = [after.model for _, after, _ in play(config)]
    rough = play(put(config, {"engine": {"precision": "bfloat16"}}))
    for expected, (_, after, _) in zip(exact, rough, strict=True):
        error = float((after.model - expected).norm() / expected.norm())
        assert 1e-6 < error < 0.1


@pytest.mark.parametrize("pruner", ["mag", "snip"])
def test_a_run_in_two_halves_is_bit_equal(here, pruner):

    config = put(BASE, {"rounds": 8, "pruning": {"pruner": pruner}, "checkpoint": {"every": 2}})
    config["model"] = {"name": "mine.py:dropout"}
    safari.run(config, here / "whole")
    with pytest.raises(KeyboardInterrupt):
        safari.run(config, here / "halves", [StopAfter(5)])
    safari.resume(here / "halves")
    for name in ("rounds.jsonl", "checkpoint.safetensors"):
        whole, halves = (next((here / run).rglob(name)) for run in ("whole", "halves"))
        assert whole.read_bytes() == halves.read_bytes()


@pytest.mark.parametrize("model", ["mine.py:dropout", "mine.py:by_vmap", "mine.py:by_loop", "cnn"])
def test_one_more_client_changes_nothing_for_the_others(model):
    change = {
        "partition": {"name": "mine.py:twenty_each"},
        "model": {"name": model},
        "pruning": {"pruner": "snip"},
    }
    ten, eleven = (
        Vectorised(world_of(put(BASE, change, {"clients": n, "local": {"augment": "crop-flip"}})))
        for n in (10, 11)
    )
    found = []
    for prepared, clients in ((ten, 10), (eleven, 11)):
        x = prepared.world.start
        masks, _ = prepared._masks(prepared.world.first_masks(x, 0), x, range(clients), 0)
        trained = prepared._train(x, masks, range(clients), 0)
        found.append((masks, trained.models, trained.losses))
    (masks, models, losses), (more_masks, more_models, more_losses) = found
    assert torch.equal(masks, more_masks[:10])
    torch.testing.assert_close(models, more_models[:10], rtol=0, atol=1e-6)
    torch.testing.assert_close(losses, more_losses[:10], rtol=0, atol=1e-6)
    apart = [float((a - b).norm()) for a, b in pairwise(more_models)]
    assert min(apart) > 1e-2, "two clients learned the same"


def test_the_mask_of_all_is_computed_once_a_round(monkeypatch):
    config = put(
        BASE, {"rounds": 3, "local": {"epochs": 0.4}, "partition": {"name": "dirichlet", "alpha": 0.3}}
    )
    calls = []
    for name in ("compute_mask", "settled_mask"):
        real = getattr(world_module, name)
        monkeypatch.setattr(
            world_module, name, lambda *a, real=real, name=name, **k: calls.append(name) or real(*a, **k)
        )
    config["wire"] = {"every": 0}
    assert len(records(config)) == 3
    # From the second round on, what is left of the model is the mask, and nothing is scored.
    assert calls == ["compute_mask", "settled_mask", "settled_mask"]


# Memory


class Cramped(Vectorised):
    """A device on which only this many clients fit."""

    fits = 3

    def __init__(self, world):
        super().__init__(world)
        self.attempts: list[int] = []

    def _begin(self, x, masks, group, t, side):
        self.attempts.append(len(group))
        self._recorded[len(group),] = None
        if len(group) > self.fits:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        assert all(len(key) == 1 and key[0] <= self.chunk for key in self._recorded), "old graphs hold memory"
        return super()._begin(x, masks, group, t, side)


@pytest.mark.parametrize("pruner", ["mag", "snip"])
def test_when_memory_is_short_fewer_clients_go_at_once(pruner):
    config = put(BASE, {"clients": 14, "arms": ["perfect"], "pruning": {"pruner": pruner}, "rounds": 2})
    world = world_of(config)
    roomy, cramped = Vectorised(world), Cramped(world)
    fed = world.federation()
    state = initial(world, fed)
    expected, theirs, _ = roomy(fed, state)
    found, ours, _ = cramped(fed, state)
    assert cramped.attempts == [14, 7, 3, 3, 3, 3, 2]
    assert cramped.chunk == 3
    torch.testing.assert_close(found.model, expected.model, rtol=0, atol=1e-6)
    assert {key: ours[key] for key in EXACT} == {key: theirs[key] for key in EXACT}
    cramped(fed, found)
    assert cramped.attempts[7:] == [3, 3, 3, 3, 2], "the size was found anew"


def test_when_not_even_one_client_fits_the_error_is_the_devices_own():
    world = world_of(put(BASE, {"arms": ["perfect"]}))
    cramped = Cramped(world)
    cramped.fits = 0
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"CUDA out of memory\."):
        cramped(world.federation(), initial(world, world.federation()))
    assert cramped.attempts == [6, 3, 1]


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "stays"),
    [(2.0, 0.0, 0.0, False), (1.9, 0.0, 0.0, True), (1.0, 1.5, 0.5, False)],
)
def test_data_stay_on_the_host_when_they_would_fill_half_of_the_device(
    monkeypatch, free, reserved, allocated, stays
):
    data = world_of(BASE).data
    size = sum(t.nbytes for t in (data.train_x, data.train_y, data.test_x, data.test_y))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * size), 10**12))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(reserved * size))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: int(allocated * size))
    went = []
    monkeypatch.setattr(type(data), "to", lambda self, device: went.append(device) or self)
    device_module.placed(data, torch.device("cuda"))
    assert went == ([] if stays else [torch.device("cuda")])


# Notes to the user


class Notes:
    def __init__(self):
        self.texts = []

    def start(self, run): ...
    def stop(self): ...
    def round(self, trial, record): ...
    def note(self, text):
        self.texts.append(text)


NOTE = (
    "clients train one after the other (layers: 2 is a PReLU, which has no stacked form; "
    "vmap: the module draws random numbers)"
)


def test_a_slow_way_is_noted_once_a_run(here):
    config = put(BASE, {"rounds": 1, "seeds": 2, "model": {"name": "mine.py:by_loop"}})
    notes = Notes()
    safari.run(config, here / "slow", [notes])
    assert notes.texts == [NOTE]
    config["model"] = {"name": "mine.py:by_vmap"}
    notes = Notes()
    safari.run(config, here / "less slow", [notes])
    assert notes.texts == [
        "clients are stacked by torch.vmap, which is slower than layer by layer "
        "(layers: 2 is a PReLU, which has no stacked form)"
    ]


@pytest.mark.parametrize(
    "change", [{}, {"model": {"name": "mine.py:by_loop"}, "engine": {"name": "reference"}}]
)
def test_the_fast_way_is_not_noted(here, change):
    notes = Notes()
    safari.run(
        put(BASE, {"rounds": 1}, engine(BASE, "reference") if change else {}, change), here / "run", [notes]
    )
    assert notes.texts == []


def test_the_command_prints_the_note_on_standard_error_in_one_line(here):
    config = put(BASE, {"rounds": 1, "model": {"name": "mine.py:by_loop"}})
    (here / "slow.toml").write_text(to_toml(parse(config)))
    done = CliRunner().invoke(cli, ["run", "slow.toml", "--trust", "--out", "slow", "--json"])
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[:2] == ["run folder: slow", f"note: {NOTE}"]
    assert "arms" in json.loads(done.stdout)


def test_a_note_is_printed_as_it_stands(capsys):
    Progress().note("a [red] word: 'x', 3.5")
    assert capsys.readouterr().err == "note: a [red] word: 'x', 3.5\n"
    Progress(quiet=True).note("a word")
    assert capsys.readouterr().err == ""


def test_a_run_of_both_engines_has_the_same_files(here):
    for name in ("reference", "vectorised"):
        safari.run(engine(put(BASE, {"rounds": 2}), name), here / name)
    listed = [
        sorted(str(p.relative_to(here / name)) for p in (here / name).rglob("*"))
        for name in ("reference", "vectorised")
    ]
    assert listed[0] == listed[1]
    assert RunFolder.open(here / "vectorised").trial("safari", 0).records()[1]["round"] == 2
