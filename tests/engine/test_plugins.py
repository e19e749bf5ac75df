"""Plug-ins of every kind, each from a real file, run to the end; and those that are wrong, by message."""

from __future__ import annotations

import json

import pytest
import torch

import safari
from engine.kit import SMALL, play, records, world_of
from safari.aggregation import RULES
from safari.config import parse
from safari.engine import ENGINES, check
from safari.models import MODELS
from safari.runs import RunFolder

MINE = '''
"""Everything that can be plugged in."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import safari
from safari.links import Link

def blobs(*, samples: int = 60):
    """Four clouds, as tensors."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(samples) % 4
    x = torch.randn(samples, 3, generator=draw) + 3 * nn.functional.one_hot(y, 4)[:, :3]
    return (x, y), (x[:20], y[:20])

def arrays():
    """The same as numpy arrays."""
    (x, y), (a, b) = blobs()
    return (x.numpy(), y.numpy()), (a.numpy(), b.numpy())

def datasets():
    """The same as Datasets."""
    train, test = blobs()
    return TensorDataset(*train), TensorDataset(*test)

def data_object():
    """The same as a Data."""
    train, test = blobs()
    return safari.data.from_tensors("blobs", train, test)

def stripes(labels, clients, rng, *, width: int = 1):
    """Runs of `width` samples for each client in turn."""
    owner = np.arange(len(labels)) // width % clients
    return [np.flatnonzero(owner == client).tolist() for client in range(clients)]

def linear(shape, classes, *, bias: bool = True):
    """One layer."""
    return nn.Linear(shape[0], classes, bias=bias)

def first_weights(module, batch, generator):
    """The first weights of each layer stay."""
    assert not module.training and batch is not None and len(batch[1]) == 5
    return {name: -torch.arange(p.numel(), dtype=torch.float64).view(p.shape)
            for name, p in module.named_parameters() if name.endswith("weight")}

built = nn.Linear(3, 4)

whole = safari.Pruner(first_weights, needs_data=True)

def alternating(*, period: int = 2):
    """Clients take turns; counts the rounds in a state of its own."""
    def init(setting):
        return {"count": np.zeros(setting.clients, np.int64)}
    def apply(state, t, rng):
        assert state["count"][0] == t
        ids = np.arange(len(state["count"]))
        return ids % period == t % period, {"count": state["count"] + 1}
    return Link(init, apply)

def stale(*, trust: float = 0.5):
    """The missing repeat their last update, discounted; a memory of every client."""
    def init(clients, size, device):
        return {"memory": torch.zeros(clients, size, device=device), "seen": torch.tensor(0)}
    def apply(state, round):
        memory = state["memory"].clone()
        memory[round.arrived] = round.models - round.global_model
        a = round.weights[round.present]
        b = trust * round.weights[~round.present]
        decision = safari.Decision(a, b, round.global_model + memory[round.missing])
        return decision, {"memory": memory, "seen": state["seen"] + 1}
    return safari.Compensation(init, apply)

def not_a_link():
    return 3

def refusing():
    from safari.errors import ConfigError
    def init(clients, size, device):
        raise ConfigError(f"clients must be even, got {clients}")
    return safari.Compensation(init, None)

def wrong_classes(shape, classes):
    return nn.Linear(shape[0], 2)

def wrong_shape(shape, classes):
    return nn.Linear(99, classes)

def two_answers(shape, classes):
    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x), x
    return Two(shape[0], classes)

def lazy(shape, classes):
    return nn.LazyLinear(classes)

def no_weights(shape, classes):
    class Add(nn.Module):
        def __init__(self):
            super().__init__()
            self.b = nn.Parameter(torch.zeros(classes))
        def forward(self, x):
            return x.sum(1, keepdim=True) + self.b
    return Add()

def no_module(shape, classes):
    return None

def empty(shape, classes):
    return nn.Flatten()

def masks(labels, clients, rng):
    return [np.arange(len(labels)) % clients == client for client in range(clients)]

def too_few(labels, clients, rng):
    return [np.arange(3)]

def beyond(labels, clients, rng):
    return [np.array([0, len(labels)])] * clients

number = 7
'''

NAMES = ", ".join(sorted(RULES))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return {
        **SMALL,
        "clients": 4,
        "arms": ["drop", "safari", "perfect"],
        "data": {"name": "mine.py:blobs", "samples": 80},
        "partition": {"name": "mine.py:stripes", "width": 2},
        "model": {"name": "mine.py:linear", "bias": False},
        "pruning": {"pruner": "mine.py:first_weights", "sparsity": 0.5, "batch": 5},
        "uplink": {"name": "mine.py:alternating", "period": 2},
        "downlink": {"name": "mine.py:alternating", "period": 1},
    }


def test_all_kinds_at_once_run_and_can_be_resumed(mine, tmp_path):
    mine["arms"] = ["drop", {"name": "memory", "rule": "mine.py:stale", "trust": 0.25}]
    mine["checkpoint"] = {"every": 2}
    assert check(parse(mine)) == []
    safari.run(mine, "whole")

    class Stop:
        def start(self, run): ...
        def stop(self): ...
        def round(self, trial, record):
            if (trial.arm, record["round"]) == ("memory", 3):
                raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        safari.run(mine, "halves", [Stop()])
    safari.resume("halves")
    for arm in ("drop", "memory"):
        for name in ("rounds.jsonl", "checkpoint.safetensors"):
            files = [tmp_path / run / f"trials/{arm}/seed-0/{name}" for run in ("whole", "halves")]
            assert files[0].read_bytes() == files[1].read_bytes()

    drop = RunFolder.open(tmp_path / "whole").trial("drop", 0).records()
    assert [r["arrived"] for r in drop] == [[0, 2], [1, 3], [0, 2], [1, 3], [0, 2]]
    assert drop[0]["density"] == 0.5
    assert drop[0]["support"] == 0.5


def test_the_partition_the_options_and_the_scores_are_the_users(mine):
    world = world_of(mine)
    assert [part.tolist()[:4] for part in world.parts] == [
        [0, 1, 8, 9],
        [2, 3, 10, 11],
        [4, 5, 12, 13],
        [6, 7, 14, 15],
    ]
    assert (len(world.data.train_x), len(world.data.test_x), world.data.classes) == (80, 20, 4)
    assert [e.name for e in world.layout.entries] == ["weight"]
    _, after, _ = next(play(mine))
    assert (after.model != 0).tolist() == [True] * 6 + [False] * 6


def test_a_rule_with_a_memory_does_as_it_says(mine):
    mine |= {"arms": [{"name": "memory", "rule": "mine.py:stale", "trust": 0.25}], "rounds": 2}
    mine["pruning"] = {"sparsity": 0.0}
    first, second = (after for _, after, _ in play(mine))
    start = world_of(mine).start
    memory = first["rule"]["memory"]
    torch.testing.assert_close(first.model, start + memory[[0, 2]].sum(0) / 4)
    updates = second["rule"]["memory"]
    assert torch.equal(updates[[0, 2]], memory[[0, 2]]), "who is missing keeps its last update"
    expected = first.model + updates[[1, 3]].sum(0) / 4 + 0.25 * updates[[0, 2]].sum(0) / 4
    torch.testing.assert_close(second.model, expected)


@pytest.mark.parametrize("name", ["arrays", "datasets", "data_object"])
def test_data_in_every_form_gives_the_same_run(mine, name):
    plain = records({**mine, "data": {"name": "mine.py:blobs", "samples": 60}})
    assert records({**mine, "data": {"name": f"mine.py:{name}"}}) == plain


def test_a_pruner_may_be_an_object(mine):
    assert records({**mine, "pruning": {**mine["pruning"], "pruner": "mine.py:whole"}}) == records(mine)


def test_a_module_on_the_path_works_as_a_file_does(mine, tmp_path, monkeypatch):
    (tmp_path / "package_of_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    assert records({**mine, "model": {"name": "package_of_mine:linear", "bias": False}}) == records(mine)


WRONG = {
    "uplink": [
        ("mine.py:not_a_link", "uplink.name: mine.py:not_a_link must return a Link, got 3"),
        ("mine.py:number", "uplink.name: mine.py:number is not a function, got 7"),
        ("mine.py:alternatin", "uplink.name: mine.py has no 'alternatin' (did you mean 'alternating'?)"),
        ("his.py:link", "uplink.name: no such file: his.py (paths are relative to the current folder)"),
        ("no.such:link", "uplink.name: cannot import no.such: ModuleNotFoundError: No module named 'no'"),
    ],
    "model": [
        (
            "mine.py:wrong_classes",
            "model: mine.py:wrong_classes must return a tensor of shape [2, at least 4] "
            "for 2 samples of 4 classes, got shape [2, 2]",
        ),
        (
            "mine.py:wrong_shape",
            "model: mine.py:wrong_shape cannot read samples of shape [3]: RuntimeError: mat1 and mat2 shapes "
            "cannot be multiplied (2x3 and 99x4)",
        ),
        (
            "mine.py:two_answers",
            "model: mine.py:two_answers must return a tensor of shape [2, at least 4] "
            "for 2 samples of 4 classes, got tuple",
        ),
        (
            "mine.py:lazy",
            "model.name: mine.py:lazy: weight has no shape yet: run a batch through the lazy module first",
        ),
        ("mine.py:empty", "model.name: mine.py:empty: Flatten has no parameters"),
        (
            "mine.py:no_weights",
            "there is nothing to prune: the module has no weights in convolution or linear layers",
        ),
        (
            "mine.py:built",
            "model.name: mine.py:built must be a function or a class that builds a module, as in "
            "def model(shape, classes), got a module itself: "
            "Linear(in_features=3, out_features=4, bias=True)",
        ),
        ("mine.py:no_module", "model.name: mine.py:no_module must return a torch.nn.Module, got None"),
    ],
    "partition": [
        (
            "mine.py:masks",
            "partition: client 0 must get a list of whole numbers, got bool of shape [80]",
        ),
        ("mine.py:too_few", "partition must return a list with one array for each of the 4 clients"),
        (
            "mine.py:beyond",
            "partition: client 0 must hold at least one sample, each between 0 and 79; got sample 80",
        ),
    ],
}


@pytest.mark.parametrize(
    ("field", "name", "message"), [(field, *case) for field, cases in WRONG.items() for case in cases]
)
def test_a_wrong_plug_in_is_reported_before_a_folder_is_made(mine, tmp_path, field, name, message):
    config = parse({**mine, field: {"name": name}})
    assert check(config) == [message]
    with pytest.raises(safari.SafariError) as error:
        safari.run(config, "run")
    assert str(error.value) == message
    assert not (tmp_path / "run").exists()


def test_wrong_rules_and_pruners(mine, tmp_path):
    mine["arms"] = ["dorp", "mine.py:refusing", "mine.py:not_a_link", {"rule": "drop", "x": 1, "name": "d"}]
    mine["pruning"] = {"pruner": "mine.py:number"}
    assert check(parse(mine)) == [
        "pruning.pruner: pruner must be a name, a Pruner or a score function, got 7",
        f"arms must be one of {NAMES}; got 'dorp' (did you mean 'drop'?); "
        "your own goes in as file.py:name or package.module:name",
        "arms: mine.py:not_a_link must return a Compensation, got 3",
        "arms: d.x is not an option (allowed: none)",
    ]
    mine |= {"arms": ["drop", "mine.py:refusing"], "pruning": {}}
    assert check(parse(mine)) == ["arms: mine.py:refusing: clients must be even, got 4"]
    with pytest.raises(safari.SafariError):
        safari.run(mine, "run")
    assert not (tmp_path / "run").exists()


def test_a_file_with_a_mistake_in_it_is_named(mine, tmp_path):
    (tmp_path / "broken.py").write_text("def link(:\n")
    (problem,) = check(parse({**mine, "uplink": {"name": "broken.py:link"}}))
    assert problem.startswith("uplink.name: cannot import broken.py: SyntaxError: ")
    (tmp_path / "broken.py").write_text("import torhc\n")
    (problem,) = check(parse({**mine, "uplink": {"name": "broken.py:link"}}))
    assert problem == ("uplink.name: cannot import broken.py: ModuleNotFoundError: No module named 'torhc'")


def test_problems_of_all_kinds_are_collected_at_once():
    wrong = {
        "clients": 10,
        "partition": {"name": "groups", "groups": 99},
        "model": {"name": "resnet20", "width": 0},
        "pruning": {"pruner": "snipp"},
        "uplink": {"name": "bernoulli", "p": [0.1, 0.2, 0.3]},
        "downlink": {"name": "gilbert-elliott", "burst": "long", "bets": 1},
        "arms": ["safri"],
    }
    assert check(parse(wrong)) == [
        "pruning.pruner must be one of grasp, mag, rand, snip, synflow; got 'snipp' (did you mean 'snip'?); "
        "your own goes in as file.py:name or package.module:name",
        "downlink.bets is not an option (allowed: p, burst, good, bad)",
        "downlink.burst must be a number, got 'long'",
        f"arms must be one of {NAMES}; got 'safri' (did you mean 'safari'?); "
        "your own goes in as file.py:name or package.module:name",
        "partition: groups must be at most the number of classes (10), got 99",
        "model: width must be at least 1, got 0",
    ]
    mended = {**wrong, "partition": {"name": "iid"}}
    lines = check(parse(mended))
    assert (
        "uplink: p must hold one number or a list whose length divides the 10 clients; got 3 numbers" in lines
    )


def test_the_engines_that_a_config_may_name_are_those_that_exist():
    for name in ENGINES:
        assert check(parse({**SMALL, "engine": {"name": name}})) == []
    with pytest.raises(safari.SafariError) as error:
        parse({"engine": {"name": "fast"}})
    assert str(error.value) == f"engine.name must be one of {', '.join(sorted(ENGINES))}; got 'fast'"


def test_data_that_is_not_there_does_not_hide_the_rest(tmp_path):
    wrong = {"data": {"name": "cifar10", "root": str(tmp_path)}, "model": {"name": "cnnn"}}
    lines = check(parse(wrong))
    assert len(lines) == 2
    assert lines[0].startswith(f"model.name must be one of {', '.join(sorted(MODELS))}; got 'cnnn'")
    assert lines[1].startswith(f"cifar10: expected {tmp_path}/cifar-10-batches-bin, found none")
    with pytest.raises(safari.errors.DataError):
        safari.run({"data": wrong["data"]}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_good_config_has_no_problems_and_checking_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check(parse({})) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("local", [{"epochs": 6e6}, {"steps": 10**7, "batch": 100}])
def test_a_check_draws_no_round_however_long(local):
    """The samples alone would be hundreds of gigabytes."""
    assert check(parse({"local": {**local, "augment": "crop-flip"}})) == []


def test_sizes_that_keep_nothing_and_pictures_that_are_none(mine):
    assert check(parse({**mine, "pruning": {"sparsity": 0.99}})) == [
        "pruning.sparsity must be at most 0.9583 to keep any of 12 weights, got 0.99"
    ]
    (problem,) = check(parse({**mine, "local": {"augment": "crop-flip"}}))
    assert problem == (
        "local.augment: augmentation 'crop-flip' needs images of shape [channels, height, width], "
        "got samples of shape [3]"
    )


def test_a_config_can_be_run_again_from_its_folder(mine, tmp_path):
    from safari.toml import read_toml

    safari.run(mine, "first")
    safari.run(parse(read_toml(tmp_path / "first/config.toml")), "second")
    for name in ("summary.json", "trials/safari/seed-0/rounds.jsonl", "config.toml"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    clients = json.loads((tmp_path / "first/clients.json").read_text())
    assert clients == {"label_counts": [[10, 10, 0, 0], [0, 0, 10, 10]] * 2, "samples": [20] * 4}


def test_the_default_links_of_another_number_of_clients_are_told_as_the_default():
    assert check(parse({"clients": 8})) == [
        "uplink: p must hold one number or a list whose length divides the 8 clients; got 5 numbers, "
        "the default (p = [1, 0.3, 0.3, 0.3, 0.3]); uplink.p = 0.3 fits any number"
    ]


def test_a_target_in_percent_is_refused_where_the_score_is_a_fraction():
    assert check(parse({"evaluation": {"target": 85}})) == [
        "evaluation.target must be at most 1, because top-1 accuracy is a fraction (0.85 is 85%), got 85.0"
    ]


def test_a_client_without_samples_is_told_with_both_numbers(mine, tmp_path):
    (tmp_path / "sparse.py").write_text(
        "import numpy as np\ndef cut(labels, clients, rng):\n    return np.array_split(np.arange(2), clients)\n"
    )
    assert check(parse({**mine, "partition": {"name": "sparse.py:cut"}})) == [
        "partition: client 2 must hold at least one sample, each between 0 and 79; "
        "got none, with 4 clients and 80 samples"
    ]


def test_an_arm_is_named_in_what_is_said_of_its_rule(mine):
    mine["arms"] = [
        {"name": "a", "rule": "fedau", "cutoff": 0},
        {"name": "b", "rule": "fedau", "cut": 1},
        {"rule": "cluster-fedvarp", "clusters": 0},
        {"name": "c", "rule": "fedu"},
    ]
    first, second, third, fourth = check(parse(mine))
    assert first == "arms: a: cutoff must lie between 1 and 1000000000, got 0"
    assert second.startswith("arms: b.cut is not an option (allowed: cutoff)")
    assert third.startswith("arms: cluster-fedvarp: clusters must ")
    assert fourth.startswith("arms: c must be one of ")


def test_an_option_that_is_not_by_name_alone_is_shown_as_it_has_to_be_written(mine, tmp_path):
    (tmp_path / "loose.py").write_text(
        "def prox(mu=0.1): ...\n"
        "def wide(shape, classes, tokens=0, hidden: int = 4, *, more=1): ...\n"
        "def shares(labels, clients, rng, share): ...\n"
    )
    mine["client"] = {"name": "loose.py:prox", "mu": 0.2}
    mine["model"] = {"name": "loose.py:wide", "hidden": 8}
    mine["partition"] = {"name": "loose.py:shares"}
    found = {problem.partition(" ")[0]: problem for problem in check(parse(mine))}
    assert found["client.mu"].endswith("write `def prox(*, mu=0.1)`")
    assert found["model.hidden"].endswith("write `def wide(shape, classes, tokens=0, *, hidden=4, more=1)`")
    assert "as in def shares(labels, clients, rng, *, share)" in found["partition.name:"]
