"""Buffers are statistics: whatever steps a rule takes, they are a mean of what was seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aggregation.samples import vector
from safari.aggregation import RULES, Compensation, Decision, Round, Server, combine
from safari.aggregation.compensation import State

# Rules that never go beyond a mean: for them a buffer is a number like any other.
MEANS = [
    "perfect",
    "attainable",
    "drop",
    "safari",
    "safari+",
    "stale",
    "fdms",
    "mifa",
    "few",
    "trimmed-mean",
    "geometric-median",
]


def begin(rule: str, clients: int = 3, **options: Any) -> Server:
    """A server with one parameter, 1, and one buffer, 1."""
    return Server.start(vector(1, 1), clients, RULES[rule](**options), parameters=1)


def step(server: Server, received: dict[int, Tensor]) -> Server:
    after, _ = server.step(received)
    if received:
        stacked, _ = server.step_stacked(
            sorted(received), torch.stack([received[i] for i in sorted(received)])
        )
        assert torch.equal(after.model, stacked.model)
    return after


# Steps from 1: 3, 0 and -3; the mean is (1, 5).
FIRST = {0: vector(4, 9), 1: vector(1, 3), 2: vector(-2, 3)}


def test_fedvarp() -> None:
    server = step(begin("fedvarp"), FIRST)
    torch.testing.assert_close(server.model, vector(1, 5))
    server = step(server, {0: vector(7, 0.5)})
    # 1 + (6 - 3) + (3 + 0 - 3)/3. Buffers would be 0.5 - (2/3)·9 + (3 + 3)/3 = -3.5; without the negative
    # weight they are (1·0.5 + (1/3)·3 + (1/3)·3) / (5/3).
    torch.testing.assert_close(server.model, vector(4, 1.5))


def test_cluster_fedvarp() -> None:
    server = step(begin("cluster-fedvarp", clusters=2), FIRST)
    torch.testing.assert_close(server.model, vector(1, 5))
    server = step(server, {0: vector(7, 0.5)})
    # Remembered of 0 and 1 a step of 1.5 and a buffer of 6, of 2 a step of -3 and a buffer of 3.
    # 1 + (6 - 1.5) + (1.5 + 1.5 - 3)/3. Buffers would be 0.5 - (2/3)·6 + (6 + 3)/3 = -0.5; they are
    # (1·0.5 + (1/3)·6 + (1/3)·3) / (5/3).
    torch.testing.assert_close(server.model, vector(5.5, 2.1))


def test_fedau() -> None:
    server = step(step(begin("fedau", clients=2), {}), {})
    assert server.model.tolist() == [1, 1]
    server = step(server, {0: vector(2, 0.6), 1: vector(4, 0.2)})
    torch.testing.assert_close(server.model, vector(3, 0.4))
    # Both came after 3 rounds, so that steps count 3 times: 3 + 3·(1 + 0)/2. Buffers would be
    # 3·(0.1 + 0.3)/2 - 2·0.4 = -0.2.
    server = step(server, {0: vector(4, 0.1), 1: vector(3, 0.3)})
    torch.testing.assert_close(server.model, vector(4.5, 0.2))


def test_known_p() -> None:
    server = step(begin("known-p", p=[0.5, 0.25, 1]), {0: vector(4, 0.3), 1: vector(1, 0.15)})
    # Weights 2/3 and 4/3: 1 + (2/3)·3. Buffers would be 0.2 + 0.2 - 1; they are (0.2 + 0.2)/2.
    torch.testing.assert_close(server.model, vector(3, 0.2))
    # A third of the way, buffers too: nothing goes beyond what was seen.
    server = step(server, {2: vector(6, 0.5)})
    torch.testing.assert_close(server.model, vector(4, 0.3))


def test_it_holds_for_a_rule_of_ones_own_that_uses_its_memory_alone() -> None:
    def apply(state: State, round: Round) -> tuple[Decision, State]:
        b = torch.tensor([1.0, -1.0], dtype=torch.float64)
        return Decision(round.weights[round.present], b, torch.tensor([[5.0, 9.0], [2.0, 1.0]])), state

    jumpy = Compensation(lambda clients, size, device: {}, apply)
    server = Server.start(vector(1, 3), 2, jumpy, parameters=1)
    # 1 + (5 - 1) - (2 - 1); of the buffers one half is the model's and one half the first recalled one's.
    assert server.step({})[0].model.tolist() == [4, 6]


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[float], list[dict[int, list[float]]]]:
    """How many clients, their weights, and who sent which two buffers in each round."""
    clients = draw(st.integers(2, 6))
    weights = draw(st.lists(st.floats(0.1, 10), min_size=clients, max_size=clients))
    buffers = st.lists(st.just(0.0) | st.floats(1e-3, 1e3), min_size=2, max_size=2)
    rounds = st.dictionaries(st.integers(0, clients - 1), buffers)
    return clients, weights, draw(st.lists(rounds, min_size=1, max_size=6))


def play(name: str, history: Any) -> tuple[list[Tensor], list[tuple[Round, Decision]]]:
    """The model before and after each round, four parameters and two buffers; and what the rule decided."""
    clients, weights, rounds = history
    draw = torch.Generator().manual_seed(5)
    rule = RULES[name]()
    decisions = []

    def apply(state: State, view: Round) -> tuple[Decision, State]:
        decision, after = rule.apply(state, view)
        decisions.append((view, decision))
        return decision, after

    server = Server.start(
        torch.ones(6), clients, Compensation(rule.init, apply), weights=weights, parameters=4
    )
    models = [server.model]
    for sent in rounds:
        received = {i: torch.cat([torch.randn(4, generator=draw), vector(*sent[i])]) for i in sorted(sent)}
        server, _ = server.step(received)
        models.append(server.model)
    return models, decisions


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=60)
@given(history=histories())
def test_buffers_stay_among_those_that_were_seen(name: str, history: Any) -> None:
    models, _ = play(name, history)
    last: dict[int, Tensor] = {}
    for before, after, sent in zip(models[:-1], models[1:], history[2], strict=True):
        fresh = {i: vector(*numbers) for i, numbers in sent.items()}
        known = torch.stack([before[4:], *last.values(), *fresh.values()])
        low, high = known.min(0).values, known.max(0).values
        assert ((after[4:] >= low * (1 - 1e-5)) & (after[4:] <= high * (1 + 1e-5))).all()
        if not sent:
            assert torch.equal(after, before)
        last |= fresh


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=30)
@given(history=histories())
def test_parameters_always_and_means_as_a_whole_are_the_linear_form(name: str, history: Any) -> None:
    """Bit for bit what they are where no number is a buffer."""
    _, decisions = play(name, history)
    for view, decision in decisions:
        whole = combine(replace(view, parameters=6), decision)
        part = slice(None) if name in MEANS else slice(4)
        assert torch.equal(combine(view, decision)[part], whole[part])
