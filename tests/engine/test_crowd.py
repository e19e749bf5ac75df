"""Few clients of many: a round costs what its cohort costs, not what the crowd would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from safari.config import parse
from safari.data import Data
from safari.engine import World, assemble
from safari.engine.state import initial
from safari.engine.vectorised import Vectorised
from safari.errors import ConfigError

CLIENTS, COHORT = 30_000, 20


def crowd(**tables: Any) -> World:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS + 100, 6, generator=draw)
    y = torch.arange(CLIENTS + 100) % 4
    data = Data("noise", x[:CLIENTS], y[:CLIENTS], x[CLIENTS:], y[CLIENTS:], 4)
    config = {
        "rounds": 3,
        "clients": CLIENTS,
        "cohort": COHORT,
        "arms": ["drop"],
        "partition": {"name": "iid"},
        "model": {"name": "mlp", "hidden": [5]},
        "local": {"steps": 2, "batch": 3},
        "uplink": {"name": "bernoulli", "p": 0.7},
        "engine": {"device": "cpu", "threads": 1},
    }
    return assemble(parse(config | tables), 0, data)


def test_only_the_cohort_is_drawn_and_the_data_stay_where_they_are(monkeypatch):
    world = crowd()
    drawn: list[tuple[int, int]] = []
    real = World.training_draw
    monkeypatch.setattr(World, "training_draw", lambda w, c, t: drawn.append((c, t)) or real(w, c, t))
    engine = Vectorised(world)
    fed = world.federation()
    state = initial(world, fed)
    for t in range(3):
        state, record, _ = engine(fed, state)
        cohort = set(world.cohort(t))
        assert len(cohort) == COHORT
        assert {c for c, at in drawn if at == t} == set(record["arrived"]) < cohort
        assert set(record["arrived"]) | set(record["missing"]) == cohort
    assert not any(v.numel() >= CLIENTS * world.layout.size for v in state["rule"].values())


def test_a_rule_that_remembers_pairs_says_that_they_are_too_many():
    with pytest.raises(ConfigError, match="clients must be at most 20000 for the rule safari"):
        crowd(arms=["safari"])
