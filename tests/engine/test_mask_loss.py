"""Masks that move while messages are lost: who missed one waits for the next, and nothing old enters the sum."""

from __future__ import annotations

import pytest
import torch

from engine.kit import world_of
from safari.engine import reference, vectorised
from safari.engine.state import initial

TABLE = {
    "rounds": 8,
    "clients": 6,
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"steps": 2, "batch": 8},
    "uplink": {"name": "bernoulli", "p": 0.6},
    "downlink": {"name": "bernoulli", "p": 0.5},
    "policy": {"name": "set", "interval": 1, "stop": 1.0},
    "client": {"name": "scaffold"},
    "engine": {"device": "cpu", "threads": 1},
}


@pytest.mark.parametrize("engine", [reference, vectorised], ids=["reference", "vectorised"])
@pytest.mark.parametrize("rule", ["drop", "safari", "safari+", "mifa", "fedvarp"])
def test_what_was_cut_is_zero_whatever_was_missed_or_is_remembered(rule, engine):
    world = world_of({**TABLE, "arms": [rule]})
    run, state = engine.prepare(world), initial(world, world.federation())
    prunable, moved = world.layout.prunable, 0
    for _ in range(world.config.rounds):
        before = state
        state, record, _ = run(world.federation(), before)
        deaf = [client for client in range(6) if client not in record["trained"]]
        # A client that missed the broadcast has learned nothing from the round.
        for name, rows in state["client"].items():
            assert torch.equal(rows[deaf], before["client"][name][deaf])
        if record["lost"]:
            assert torch.equal(state.model, before.model)
            continue
        # Memories of older masks reach no weight that this round's mask cuts.
        assert not bool(state.model[~state.mask & prunable].any())
        moved += before.mask is not None and not torch.equal(before.mask, state.mask)
    assert moved > 3
