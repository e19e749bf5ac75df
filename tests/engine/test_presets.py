"""The settings that come with the repository: they parse, and mean what their comments say."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

from safari.config import Config, parse
from safari.data import Data
from safari.engine import World, assemble
from safari.engine.parts import KINDS

EXPERIMENTS = Path(__file__).parents[2] / "evidence" / "experiments" / "base"
FILES = sorted(EXPERIMENTS.glob("*.toml"))


def read(name: str) -> Config:
    return parse(tomllib.loads((EXPERIMENTS / name).read_text()))


def pictures(samples: int) -> Data:
    """Noise of CIFAR-10's shape."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(samples + 20, 3, 32, 32, generator=draw)
    y = torch.arange(samples + 20) % 10
    return Data("noise", x[:samples], y[:samples], x[samples:], y[samples:], 10)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_setting_parses_and_names_what_exists(path):
    config = read(path.name)
    for kind in ("data", "partition", "model"):
        assert getattr(config, kind).name in KINDS[kind]


def one_epoch(world: World, client: int) -> None:
    index, _ = world.training_draw(client, t=3)
    assert index.shape == (5, 10)
    assert sorted(index.flatten().tolist()) == world.parts[client].tolist(), "each image once"


def test_the_setting_of_pfl_research():
    config = read("pfl-cifar10.toml")
    # 50 images each, as in 50,000 / 1,000, with fewer clients.
    small = parse({**config.to_dict(), "clients": 60, "engine": {"device": "cpu"}})
    world = assemble(small, 0, pictures(60 * 50))
    assert {len(part) for part in world.parts} == {50}
    for client in (0, 59):
        one_epoch(world, client)
    cohorts = [world.cohort(t) for t in range(3)]
    assert [len(set(cohort)) for cohort in cohorts] == [50, 50, 50]
    assert cohorts[0] != cohorts[1]
    assert config.local.optimiser == "sgd"
    assert config.local.lr / world.steps(0) == pytest.approx(0.1)
    assert world.mask(world.start, 0, 1).all(), "dense"
    assert (config.clients, config.cohort, config.rounds) == (1000, 50, 1500)
