"""Huge updates, of every size that float32 can hold, against every rule; and the robust rules by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aggregation.samples import vector
from safari.aggregation import RULES, Decision, Round, Server, combine
from safari.aggregation.compensation import Compensation, NotFiniteError
from safari.aggregation.plus import cosines_with_memory
from safari.errors import ConfigError

SIZE, PARAMETERS, CLIENTS = 24, 20, 6
GIANTS = [1e15, 1e19, -1e19, 1e25, 1e38, -3.4e38]
OPTIONS: dict[str, dict[str, Any]] = {"cluster-fedvarp": {"clusters": 3}, "known-p": {"p": 0.1}}


def start(rule: str, gate: str, **more: Any) -> Server:
    model = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    made = RULES[rule](**OPTIONS.get(rule, {}))
    return Server.start(model, CLIENTS, made, parameters=PARAMETERS, gate=gate, **more)


def honest(server: Server, ids: list[int]) -> dict[int, Tensor]:
    draw = torch.Generator().manual_seed(server.round)
    return {i: (server.model + 0.1 * torch.randn(SIZE, generator=draw)).clamp(-1e30, 1e30) for i in ids}


def hostile(form: str, giant: float) -> Tensor:
    if form == "all":
        return torch.full((SIZE,), giant)
    if form == "one":
        return torch.eye(SIZE)[3] * giant
    if form == "buffer":
        return torch.eye(SIZE)[PARAMETERS + 1] * giant
    return giant * torch.ones(SIZE).cumprod(0) * torch.tensor([1.0, -1.0]).repeat(SIZE // 2)


# Who arrives in each round; the hostile ones send huge updates.
STORIES = {
    "first": ([0], [[0, 1, 2, 3], [1, 2], [0, 1, 2, 3, 4, 5], [3], []]),
    "later": ([2, 5], [[0, 1, 3, 4], [0, 1, 2, 3], [2], [2, 5], [0, 1, 4], [0, 3, 5], []]),
    "alone": ([1], [[1], [1], [0, 2, 3], [1], [0, 1, 2, 3, 4, 5]]),
    "most": ([0, 1, 2, 3], [[0, 1, 2, 3, 4], [0, 1, 2, 3], [4, 5], [0, 4]]),
}


@pytest.mark.parametrize("giant", GIANTS)
@pytest.mark.parametrize("rule", RULES)
def test_no_finite_update_stops_a_server(rule: str, giant: float) -> None:
    """With any gate, order of arrivals and place of the huge numbers: no error, and a finite model."""
    for gate in ("off", "norm"):
        for enemies, rounds in STORIES.values():
            for form in ("all", "one", "buffer", "signs"):
                server = start(rule, gate, steps=["fedadam"] if form == "one" else ())
                for ids in rounds:
                    sent = honest(server, ids)
                    sent |= {i: hostile(form, giant) for i in enemies if i in sent}
                    server, outcome = server.step(sent)
                    assert server.model.isfinite().all()
                    assert {*outcome.arrived, *outcome.refused} == set(ids)
                    assert not {*outcome.arrived} & {*outcome.refused}


@pytest.mark.parametrize("giant", GIANTS)
@pytest.mark.parametrize("rule", RULES)
def test_with_the_gate_huge_updates_have_no_effect(rule: str, giant: float) -> None:
    enemies, rounds = STORIES["later"]
    server = other = start(rule, "norm")
    for ids in rounds:
        sent = honest(server, ids)
        good = {i: model for i, model in sent.items() if i not in enemies}
        server, outcome = server.step(good | {i: hostile("all", giant) for i in enemies if i in sent})
        other, _ = other.step(good)
        assert set(outcome.refused) == set(enemies) & set(ids)
        assert torch.equal(server.model, other.model)


def test_a_sum_beyond_float32_blames_who_is_to_blame() -> None:
    server = Server.start(vector(1, 1), 3, RULES["known-p"](p=0.1), gate="off")
    server, outcome = server.step({0: vector(3e38, 0), 1: vector(2, 2), 2: vector(2, 2)})
    assert dict(outcome.refused) == {0: "its numbers, up to 3e+38, are too large to be averaged"}
    assert outcome.arrived == (1, 2)
    torch.testing.assert_close(server.model, vector(1 + 20 / 3, 1 + 20 / 3))


def test_a_sum_with_huge_remembered_updates_is_a_lost_round() -> None:
    """fedvarp takes 2/3 of what it remembers of 0 away, and adds 2/3 of the others's: beyond float32."""
    server = Server.start(vector(0, 0), 3, "fedvarp", gate="off")
    before, _ = server.step({0: vector(-3e38, 0), 1: vector(3e38, 0), 2: vector(3e38, 0)})
    server, outcome = before.step({0: vector(1, 1)})
    assert outcome.lost
    assert dict(outcome.refused) == {
        0: "its sum with what the server holds, numbers up to 3e+38, is not finite"
    }
    assert torch.equal(server.model, before.model)
    assert server.round == 2


def test_a_faulty_rule_is_blamed_and_not_its_clients() -> None:
    def apply(state: Any, round: Round) -> tuple[Decision, Any]:
        return Decision(torch.full((len(round.arrived),), 3e38)), state

    server = Server.start(vector(1, 1), 2, Compensation(lambda *_: {}, apply))
    with pytest.raises(NotFiniteError, match="the new model must be finite"):
        server.step({0: vector(9, 9), 1: vector(9, 9)})


def test_combine_looks_again_after_what_is_left_to_the_old_model() -> None:
    """The sum of the arrivals is -2, and three times the old model's -3e38 is left to it."""
    view = Round(
        number=4,
        global_model=vector(-3e38, 1),
        cohort=torch.arange(1),
        arrived=torch.arange(1),
        models=vector(1, 1)[None],
        masks=torch.ones(1, 2, dtype=torch.bool),
        weights=torch.ones(1),
        parameters=2,
    )
    with pytest.raises(NotFiniteError, match="got 1 numbers NaN or infinite in round 4"):
        combine(view, Decision(torch.tensor([-2.0])))


@pytest.mark.parametrize("scale", [1e17, 1e19, 1e30, 3e37])
def test_cosines_of_huge_updates_are_those_of_their_directions(scale: float) -> None:
    draw = torch.Generator().manual_seed(2)
    steps = torch.randn(4, SIZE, generator=draw)
    old = torch.randn(CLIENTS, SIZE, generator=draw)

    def cosines(factor: float) -> Tensor:
        view = Round(
            number=0,
            global_model=torch.zeros(SIZE),
            cohort=torch.arange(CLIENTS),
            arrived=torch.arange(4),
            models=steps * factor,
            masks=torch.ones(4, SIZE, dtype=torch.bool),
            weights=torch.ones(CLIENTS),
            parameters=SIZE,
        )
        return cosines_with_memory({"updates": old * factor}, view)

    found = cosines(scale)
    assert found.shape == (4, 4 + CLIENTS)
    torch.testing.assert_close(found, cosines(1.0), rtol=1e-4, atol=1e-5)


# --- the robust rules


def test_a_trimmed_mean_by_hand() -> None:
    """Of five values 1 is cut at each end, coordinate by coordinate: 0.2 · 5 = 1."""
    sent = {0: vector(1, 9), 1: vector(2, 1), 2: vector(3, 2), 3: vector(4, 3), 4: vector(1e38, -1e38)}
    server = Server.start(vector(0, 0), 5, RULES["trimmed-mean"](), gate="off")
    after, outcome = server.step(sent)
    assert after.model.tolist() == [3, 2]
    assert outcome.arrived == (0, 1, 2, 3, 4)
    # Of four: 0.8, so 1. Of three, the median. Of two, both. Of one, it.
    for ids, expected in (([0, 1, 2, 3], [2.5, 2.5]), ([0, 1, 2], [2, 2]), ([0, 1], [1.5, 5]), ([3], [4, 3])):
        after, _ = server.step({i: sent[i] for i in ids})
        assert after.model.tolist() == expected
    assert Server.start(vector(5), 2, "trimmed-mean").step({})[0].model.tolist() == [5]


@given(st.integers(1, 12), st.floats(0, 0.49), st.integers(0, 10**6))
def test_a_trimmed_mean_as_numpy_sorts(count: int, trim: float, seed: int) -> None:
    models = np.random.default_rng(seed).normal(size=(count, 3)).astype(np.float32)
    cut = 0
    while cut < trim * count - 1e-9 and 2 * (cut + 1) < count:
        cut += 1
    expected = [np.mean(sorted(models[:, k])[cut : count - cut]) for k in range(3)]
    server = Server.start(torch.zeros(3), count, RULES["trimmed-mean"](trim=trim), gate="off")
    server, _ = server.step(dict(enumerate(torch.from_numpy(models))))
    assert server.model.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_geometric_median_on_a_line_is_the_median() -> None:
    sent = {0: vector(1), 1: vector(2), 2: vector(3), 3: vector(70), 4: vector(1e38)}
    server = Server.start(vector(0), 5, RULES["geometric-median"](iterations=300), gate="off")
    after, _ = server.step(sent)
    assert after.model.item() == pytest.approx(3, abs=0.05)
    # With four times its weight, client 0 has more than half of all.
    server = Server.start(
        vector(0), 5, RULES["geometric-median"](iterations=300), weights=[4, 1, 1, 1, 0.5], gate="off"
    )
    after, _ = server.step(sent)
    assert after.model.item() == pytest.approx(1, abs=0.05)


def test_a_geometric_median_of_a_triangle() -> None:
    """Of an equilateral triangle it is the centre, of a very flat one the corner with the blunt angle."""
    corners = {i: vector(np.cos(2 * np.pi * i / 3), np.sin(2 * np.pi * i / 3)) for i in range(3)}
    server = Server.start(vector(0.3, 0.2), 3, "geometric-median")
    after, _ = server.step(corners)
    assert after.model.tolist() == pytest.approx([0, 0], abs=1e-3)
    flat = {0: vector(-10, 0), 1: vector(0, 1), 2: vector(10, 0)}
    server = Server.start(vector(0.3, 0.2), 3, RULES["geometric-median"](iterations=200))
    after, _ = server.step(flat)
    assert after.model.tolist() == pytest.approx([0, 1], abs=0.05)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(3, 8))
def test_a_geometric_median_has_a_small_sum_of_distances(seed: int, count: int) -> None:
    """Smaller, up to smoothing, than the mean, any of the models, and points around it have."""
    rng = np.random.default_rng(seed)
    models = rng.normal(size=(count, 5)).astype(np.float32)
    server = Server.start(torch.zeros(5), count, RULES["geometric-median"](iterations=100), gate="off")
    server, _ = server.step(dict(enumerate(torch.from_numpy(models))))
    found = server.model.numpy()
    others = [models.mean(0), *models, *(found + 0.1 * rng.normal(size=(20, 5)))]

    def total(point: np.ndarray) -> float:
        return float(np.linalg.norm(models - point, axis=1).sum())

    assert all(total(found) <= total(other) * (1 + 1e-3) for other in others)


@pytest.mark.parametrize(
    ("rule", "options", "text"),
    [
        ("trimmed-mean", {"trim": 0.5}, "trim must be at least 0 and below 0.5, got 0.5"),
        ("trimmed-mean", {"trim": -0.1}, "trim must be at least 0 and below 0.5, got -0.1"),
        ("geometric-median", {"iterations": 0}, "iterations must lie between 1 and 1000, got 0"),
        ("geometric-median", {"smoothing": 0.0}, "smoothing must be a finite number above 0, got 0.0"),
    ],
)
def test_options_out_of_bounds(rule: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        RULES[rule](**options)
    assert str(error.value) == text
