"""Arms side by side: while one is averaged and tested, the next one's clients train. Nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import safari
from engine.kit import StopAfter, world_of
from engine.test_vectorised import BASE, CNN, put
from safari.engine import rule_of, side_by_side
from safari.engine.stack import cpu
from safari.engine.state import State, initial
from safari.engine.vectorised import Vectorised
from safari.federation import Federation

ARMS = {"arms": ["perfect", "drop", "safari"], "rounds": 4, "clients": 10}


pytestmark = pytest.mark.usefixtures("two_threads")


def beginnings(engine: Vectorised) -> list[tuple[Federation, State]]:
    feds = [engine.world.federation(rule_of(arm.rule)) for arm in engine.world.config.arms]
    return [(fed, initial(engine.world, fed)) for fed in feds]


def one_by_one(config: dict[str, Any], rounds: int) -> list[list[tuple[State, Any]]]:
    """Every arm for itself: the states and records of its rounds."""
    engine = Vectorised(world_of(config))
    found = []
    for fed, state in beginnings(engine):
        arm = []
        for _ in range(rounds):
            state, record, _ = engine(fed, state)
            arm.append((state, record))
        found.append(arm)
    return found


def the_same(found: State, expected: State) -> None:
    assert found.round == expected.round
    assert torch.equal(found.model, expected.model)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"pruning": {"pruner": "snip"}},
        {"uplink": {"name": "bernoulli", "p": 0.1}},
        {"local": {"epochs": 0.4}, "partition": {"name": "dirichlet", "alpha": 0.3}},
        {"model": {"name": "mine.py:dropout"}},
        {"diagnostics": {"every": 2}, "wire": {"every": 1}},
    ],
    ids=["as it is", "masks of their own", "rounds in which nobody arrives", "sizes", "no pool", "diagnosed"],
)
def test_every_bit_is_that_of_an_arm_by_itself(change):
    config = put(BASE, CNN, ARMS, change)
    expected = one_by_one(config, 4)
    engine = Vectorised(world_of(config))
    arms = beginnings(engine)
    for t in range(4):
        rounds = list(engine.side_by_side(arms))
        for arm, (state, record, seconds) in enumerate(rounds):
            the_same(state, expected[arm][t][0])
            assert record == expected[arm][t][1]
            assert all(part >= 0 for part in seconds.values())
        arms = [(fed, state) for (fed, _), (state, _, _) in zip(arms, rounds, strict=True)]


@pytest.mark.parametrize("stacked", [1, 2, 16])
def test_also_when_arms_are_not_equally_far(monkeypatch, stacked):
    monkeypatch.setattr(cpu, "MOST_CLIENTS", stacked)
    config = put(BASE, CNN, ARMS)
    expected = one_by_one(config, 3)
    engine = Vectorised(world_of(config))
    first = beginnings(engine)
    later = [first[0][1], expected[1][0][0], expected[2][1][0]]
    arms = [(fed, state) for (fed, _), state in zip(first, later, strict=True)]
    for arm, (state, record, _) in enumerate(engine.side_by_side(arms)):
        the_same(state, expected[arm][arm][0])
        assert record == expected[arm][arm][1]


def test_stopping_in_between_leaves_nothing_behind():
    engine = Vectorised(world_of(put(BASE, CNN, ARMS)))
    states = beginnings(engine)
    expected = list(engine.side_by_side(states))
    rounds = engine.side_by_side(states)
    next(rounds)
    rounds.close()
    assert torch.get_num_threads() == 1
    for found, right in zip(engine.side_by_side(states), expected, strict=True):
        the_same(found[0], right[0])


def test_an_error_of_one_arm_comes_out(monkeypatch):
    engine = Vectorised(world_of(put(BASE, CNN, ARMS)))
    states = beginnings(engine)
    with monkeypatch.context() as patch:
        patch.setattr(Vectorised, "_train_stacked", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(engine.side_by_side(states))
    assert torch.get_num_threads() == 1
    assert len(list(engine.side_by_side(states))) == 3


def test_an_engine_without_it_runs_arm_after_arm():
    arms = [("a", 1), ("b", 2)]
    assert list(side_by_side(lambda fed, state: (state, fed, {}), arms)) == [(1, "a", {}), (2, "b", {})]


def test_a_run_of_several_arms_in_two_halves_is_bit_equal(tmp_path):
    config = put(BASE, CNN, ARMS, {"rounds": 5, "checkpoint": {"every": 2}})
    safari.run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        safari.run(config, tmp_path / "halves", [StopAfter(4)])
    safari.resume(tmp_path / "halves")
    for name in ("rounds.jsonl", "checkpoint.safetensors"):
        whole, halves = (sorted((tmp_path / run).rglob(name)) for run in ("whole", "halves"))
        assert len(whole) == 3
        for one, other in zip(whole, halves, strict=True):
            assert one.read_bytes() == other.read_bytes()
