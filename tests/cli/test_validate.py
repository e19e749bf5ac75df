"""What `safari validate` calls fine is what `safari run` can start, and all mistakes are reported at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import safari as package
from runs.kit import TINY
from safari.cli import cli
from safari.config import parse
from safari.errors import ConfigError
from safari.toml import to_toml

PARTS = """
import numpy as np
import torch
from torch import nn


def sentences():
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, 20, (80, 6)))
    labels = torch.from_numpy(rng.integers(0, 3, 80))
    return (tokens, labels), (tokens[:20], labels[:20])


def words(shape, classes):
    return nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(4 * shape[0], classes))


def blobs():
    # The data of docs/plugins.md: so few inputs that the output layer has the smallest weights by far.
    rng = np.random.default_rng(0)
    y = np.arange(600) % 4
    x = np.array([[0, 0], [0, 2], [2, 0], [2, 2]])[y] + 0.5 * rng.standard_normal((600, 2))
    return (x[100:], y[100:]), (x[:100], y[:100])


def from_1():
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.standard_normal((80, 6))), torch.arange(80) % 3 + 1
    return (x, y), (x[:20], y[:20])


def zero_in_the_test():
    (x, y), (a, b) = from_1()
    return (x, y), (a, b - 1)


def gap():
    # Classes 0 and 2 are empty: no sign that somebody counts from 1.
    (x, y), (a, b) = from_1()
    return (x, y + (y > 1)), (a, b + (b > 1))


class ZeroFirst(nn.Module):
    # As in LoRA, the second matrix starts at 0.
    def __init__(self, inputs, classes):
        super().__init__()
        self.down, self.up = nn.Linear(inputs, 8, bias=False), nn.Linear(8, classes, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.up(self.down(x.flatten(1)))


def adapter(shape, classes):
    return ZeroFirst(int(np.prod(shape)), classes)


def public(labels, clients, rng):
    return [np.arange(10 + client) for client in range(clients)]


def twice(labels, clients, rng):
    return [np.array([2 * client, 2 * client + 1, 2 * client]) for client in range(clients)]
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "tiny.toml").write_text(to_toml(parse(TINY)))
    rows = [f"{t},{c},1" for t in range(5) for c in range(4)]
    (tmp_path / "five.csv").write_text("\n".join(["round,client,delivered", *rows]))
    return tmp_path


def verdict(**settings: object) -> dict:
    changes = [
        part for key, value in settings.items() for part in ("--set", f"{key.replace('__', '.')}={value}")
    ]
    return json.loads(CliRunner().invoke(cli, ["validate", "tiny.toml", *changes, "--json"]).stdout)


def test_synflow_with_tokens(here):
    tokens = {"data__name": "parts.py:sentences", "model__name": "parts.py:words", "partition__name": "iid"}
    assert verdict(**tokens)["valid"]
    (problem,) = verdict(**tokens, pruning__pruner="synflow")["problems"]
    assert "synflow feeds an input of ones, so inputs must be real numbers; got torch.int64" in problem


def test_a_trace_that_is_shorter_than_the_run(here):
    trace = {"uplink__name": "trace", "uplink__file": "five.csv"}
    assert verdict(**trace)["valid"], "it begins again"
    assert verdict(**trace, uplink__after="error")["problems"] == [
        "rounds must be at most the 5 that uplink has, got 7"
    ]
    assert verdict(**trace, uplink__after="error", rounds=5)["valid"]
    down = {"downlink__name": "trace", "downlink__file": "five.csv", "downlink__after": "error"}
    assert verdict(**down)["problems"] == ["rounds must be at most the 5 that downlink has, got 7"]
    config = parse({**TINY, "uplink": {"name": "trace", "file": "five.csv", "after": "error"}})
    with pytest.raises(ConfigError, match="rounds must be at most the 5 that uplink has, got 7"):
        package.run(config, "run", progress=False)
    assert not (here / "run").exists()


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("public", "partition: 12 samples are held more than once, such as sample 0 by clients 0 and 1"),
        ("twice", "partition: 4 samples are held more than once, such as sample 0 by client 0 alone"),
    ],
)
def test_a_sample_with_several_owners_is_noted_and_can_be_meant(here, name, note, capsys):
    found = verdict(partition__name=f"parts.py:{name}")
    assert found["valid"]
    assert found["notes"] == [note]
    shown = CliRunner().invoke(cli, ["validate", "tiny.toml", "--set", f"partition.name=parts.py:{name}"])
    assert shown.stderr == f"note: {note}\n"
    package.run({**TINY, "rounds": 1, "partition": {"name": f"parts.py:{name}"}}, "run")
    assert f"note: {note}" in capsys.readouterr().err


def test_labels_that_begin_at_1_are_noted(here, capsys):
    note = "data: no training sample has class 0; labels count from 0 (where yours begin at 1, give y - 1)"
    own = {"partition__name": "iid", "pruning__scope": "erk"}
    found = verdict(data__name="parts.py:from_1", **own)
    assert found["valid"]
    assert found["notes"] == [note]
    found = verdict(data__name="parts.py:gap", **own)
    assert (found["valid"], found["notes"]) == (True, [])
    found = verdict(data__name="parts.py:zero_in_the_test", **own)
    assert found["notes"] == ["data: 1 class of the test set has no training sample, such as class 0"]
    table = {"data": {"name": "parts.py:from_1"}, "partition": {"name": "iid"}, "pruning": {"scope": "erk"}}
    package.run({**TINY, "rounds": 1, **table}, "run")
    assert f"note: {note}" in capsys.readouterr().err


DEAD = "pruning: {0} keeps nothing of {1}"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"data__name": "parts.py:blobs"}, DEAD.format("the first mask", "3.weight")),
        ({"model__name": "parts.py:adapter"}, DEAD.format("the first mask", "up.weight")),
        # All scores are 0 there, and ties are broken by index.
        (
            {"model__name": "parts.py:adapter", "pruning__pruner": "snip"},
            DEAD.format("client 0's first mask", "up.weight"),
        ),
        ({"data__name": "parts.py:blobs", "pruning__allow_dead_layers": "true"}, None),
        ({"data__name": "parts.py:blobs", "pruning__scope": "erk"}, None),
        ({"data__name": "parts.py:blobs", "pruning__least": 0.02}, None),
        ({"data__name": "parts.py:blobs", "pruning__sparsity": 0.3, "pruning__dense": '["last"]'}, None),
    ],
)
def test_a_layer_that_is_cut_whole_stops_a_run(here, settings, problem):
    model = {} if "model__name" in settings else {"model__name": "mlp", "model__hidden": "[64]"}
    found = verdict(**{**model, "partition__name": "iid", **settings})
    assert found["valid"] == (problem is None), found
    for line in found["problems"]:
        assert line.startswith(problem)
        assert all(f"pruning.{field} = " in line for field in ("least", "scope", "allow_dead_layers"))


def test_a_run_with_such_a_layer_has_no_folder_unless_it_is_allowed(here):
    config = {**TINY, "rounds": 1, "model": {"name": "parts.py:adapter"}}
    with pytest.raises(ConfigError, match=r"keeps nothing of up\.weight"):
        package.run(config, "run", progress=False)
    assert not (here / "run").exists()
    package.run({**config, "pruning": {"allow_dead_layers": True}}, "run", progress=False)
    assert (here / "run" / "summary.json").exists()


def test_no_mistake_hides_behind_another(here):
    """A plug-in that is missing, data that cannot be divided, a link that is too short, a field that is no field."""
    problems = verdict(
        pruning__pruner="snpi",
        clients=2000,
        uplink__name="trace",
        uplink__file="gone.csv",
        downlink__name="bernoulli",
        downlink__p=3,
    )["problems"]
    for words in ("pruning.pruner must be one of", "clients must be at most", "p must lie between 0 and 1"):
        assert any(words in line for line in problems), problems
    assert any(
        "gone.csv: no such trace file" in line
        for line in verdict(uplink__name="trace", uplink__file="gone.csv", pruning__pruner="snpi")["problems"]
    )
