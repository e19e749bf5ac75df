"""Local steps taken one by one, as a GPU replays them, against all of a round at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kit import world_of
from safari.engine.clients import side_of
from safari.engine.group_steps import Inputs, ReplayableSteps
from safari.engine.stack.random_state import RandomState
from safari.engine.stack.sample_draws import step_by_step
from safari.engine.vectorised import Vectorised
from safari.training import CLIENTS

MOST = 9
CONFIG: dict[str, Any] = {
    "clients": 6,
    "arms": ["drop"],
    "model": {"name": "cnn", "width": 4},
    "local": {"steps": 4, "batch": 8, "augment": "crop-flip", "optimiser": "sgd", "lr": 0.1},
    "uplink": {"name": "bernoulli", "p": 0.5},
    "engine": {"device": "cpu", "threads": 1},
}


def group_of(config: dict[str, Any], group: list[int]) -> tuple[Vectorised, Inputs, RandomState, int]:
    """A group's inputs in round 0, with vectors from the server and states of the clients that are not 0."""
    engine = Vectorised(world_of(config))
    world, draw = engine.world, torch.Generator().manual_seed(1)
    half = world.client.server

    def some(state: Any) -> dict[str, Tensor]:
        return {name: 0.1 * torch.rand(t.shape, generator=draw) for name, t in state.items()}

    size = (len(world.parts), world.layout.parameters, world.device)
    down = {} if half is None else some(half.down(half.init(*size)))
    side = side_of(world, some(world.client.init(*size)), down, group)
    masks = torch.rand(len(group), world.layout.size, generator=draw) < 0.5
    index, extra = step_by_step([world.training_draw(client, 0) for client in group])
    draws = [torch.from_numpy(d) for d in extra]
    inputs = Inputs(world.start, masks, [torch.from_numpy(index)], draws, side, 0.1)
    return engine, inputs, RandomState(group, world.device, world.counters), len(index)


def one_by_one(engine: Vectorised, inputs: Inputs, draws: RandomState, steps: int) -> tuple[Tensor, ...]:
    """As `RecordedSteps` does it: from places with room for more steps."""
    places = inputs.padded(MOST)
    count = torch.tensor(float(steps), dtype=torch.float64)
    clients = len(inputs.masks)
    begun = ReplayableSteps(engine._steps, clients, places.described(), draws, count, *places.tensors())
    for _ in range(steps - 1):
        begun.again()
    return begun.end()


@pytest.mark.parametrize(
    ("name", "optimiser"),
    [*((name, "sgd") for name in sorted(CLIENTS)), ("fedavg", "adam"), ("scaffold", "adam")],
)
@pytest.mark.parametrize("group", [[0, 2, 5], [3]], ids=["three", "one"])
def test_steps_one_by_one_give_what_a_whole_round_gives(name, optimiser, group):
    """Bit for bit, but for the losses, which are summed in another order."""
    config = {**CONFIG, "client": {"name": name}, "local": {**CONFIG["local"], "optimiser": optimiser}}
    engine, inputs, draws, steps = group_of(config, group)
    models, losses, *rest = engine._steps.run(len(group), inputs, draws, *inputs.tensors())
    alone = one_by_one(engine, inputs, RandomState(group, engine.world.device), steps)
    assert torch.equal(alone[0], models)
    torch.testing.assert_close(alone[1], losses, rtol=1e-6, atol=0)
    assert len(alone) == len(rest) + 2
    for found, expected in zip(alone[2:], rest, strict=True):
        assert torch.equal(found, expected)
    assert not torch.equal(models[0], engine.world.start), "nothing was trained"


def test_the_state_stays_in_its_place_from_step_to_step():
    """A recording reads and writes fixed addresses: a state that moved would be read from where it was."""
    engine, inputs, draws, _ = group_of({**CONFIG, "client": {"name": "scaffold"}}, [0, 1])
    places = inputs.padded(MOST)
    count = torch.tensor(4.0, dtype=torch.float64)
    begun = ReplayableSteps(engine._steps, 2, places.described(), draws, count, *places.tensors())
    local = begun._local._local
    before = {name: tensor.data_ptr() for name, tensor in local.state.items()}
    assert set(before) == {"variate", "sum"}
    total = local.state["sum"].clone()
    begun.again()
    assert {name: tensor.data_ptr() for name, tensor in local.state.items()} == before
    assert not torch.equal(local.state["sum"], total)


def test_samples_beyond_the_last_step_are_never_looked_at():
    engine, inputs, draws, steps = group_of(CONFIG, [1, 4])
    expected = one_by_one(engine, inputs, draws, steps)
    index = inputs.picked[0].clone()
    spoilt = torch.cat([index, torch.full((MOST - steps, index.shape[1]), 10**9)])
    extra = [torch.from_numpy(np.zeros((MOST, *d.shape[1:]), d.numpy().dtype)) for d in inputs.draws]
    for place, d in zip(extra, inputs.draws, strict=True):
        place[:steps] = d
    other = Inputs(inputs.start, inputs.masks, [spoilt], extra, inputs.side, inputs.lr)
    found = one_by_one(engine, other, RandomState([1, 4], engine.world.device), steps)
    assert torch.equal(found[0], expected[0])
