"""Vectors that client algorithms send beside their models, in front of the gate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from safari.aggregation import GATES, Gate, Server, to_tensors, with_tensors
from safari.federation.algorithm import half_step
from safari.training import CLIENTS as ALGORITHMS

SIZE, CLIENTS = 40, 5
# Algorithm -> what it sends beside a model, and how many numbers that has.
BESIDE = {
    "scaffold": ("variate", SIZE),
    "feddyn": ("h", SIZE),
    "fednova": ("steps", 1),
    "dane": ("gradient", SIZE),
    "bvr-l-sgd": ("gradient", SIZE),
}


def start(algorithm: str, gate: str | Gate = "norm") -> Server:
    half = ALGORITHMS[algorithm]().server
    assert half is not None
    algorithm = half_step(half, CLIENTS, SIZE)
    return Server.start(torch.ones(SIZE), CLIENTS, "drop", algorithm=algorithm, gate=gate)


def beside(
    algorithm: str, rounds: int, hostile: float | None, gate: str | Gate = "norm"
) -> tuple[Server, list[Any]]:
    """A server with an algorithm's half, some honest rounds of five clients, and what client 4 sends beside."""
    server = start(algorithm, gate)
    name, numbers = BESIDE[algorithm]
    outcomes = []
    for t in range(rounds):
        draw = torch.Generator().manual_seed(t)
        ids = [i for i in range(CLIENTS) if (i + t) % 3]
        models = server.model + 0.1 * torch.randn(len(ids), SIZE, generator=draw)
        rows = torch.randn(len(ids), numbers, generator=draw).abs() + 1
        if hostile is not None and 4 in ids:
            rows[ids.index(4)] = hostile
        server, outcome = server.step_stacked(ids, models, up={name: rows})
        outcomes.append(outcome)
    return server, outcomes


@pytest.mark.parametrize("giant", [1e6, -1e11, 3e38])
@pytest.mark.parametrize("algorithm", BESIDE)
def test_huge_vectors_beside_a_model_are_refused(algorithm: str, giant: float) -> None:
    server, outcomes = beside(algorithm, 6, giant)
    refused = [outcome.refused[4] for outcome in outcomes if 4 in outcome.refused]
    name = BESIDE[algorithm][0]
    assert len(refused) == 4
    assert all(text.startswith(f"its {name}, beside the model, has a norm of ") for text in refused)
    largest = max(float(t.abs().max()) for t in (server.model, *server.algorithm_state.values()))
    # FedDyn divides by alpha, 0.01, in every round.
    assert largest < 1e5


@pytest.mark.parametrize("algorithm", BESIDE)
def test_vectors_of_honest_clients_pass_bit_for_bit(algorithm: str) -> None:
    gated, plain = beside(algorithm, 6, None)[0], beside(algorithm, 6, None, "off")[0]
    assert torch.equal(gated.model, plain.model)
    for name, tensor in plain.algorithm_state.items():
        assert torch.equal(gated.algorithm_state[name], tensor)


@pytest.mark.parametrize("giant", [1e30, 3e38])
@pytest.mark.parametrize("algorithm", BESIDE)
def test_huge_vectors_beside_a_model_do_not_stop_a_server_without_a_gate(
    algorithm: str, giant: float
) -> None:
    server, _ = beside(algorithm, 6, giant, "off")
    assert bool(torch.isfinite(server.model).all())


@pytest.mark.parametrize("steps", [0.0, -5.0])
def test_a_client_that_claims_to_have_made_no_step(steps: float) -> None:
    server = start("fednova")
    server, _ = server.step_stacked([4], torch.full((1, SIZE), 1.5), up={"steps": torch.tensor([[steps]])})
    assert server.model.tolist() == [1.5] * SIZE


def test_vectors_beside_a_model_are_clipped_by_hand() -> None:
    server = start("scaffold", GATES["norm"](factor=2.0, action="clip", floor=0.0))
    rows = torch.tensor([1.0, 1.0, 1.0, 8.0])[:, None].expand(4, SIZE)
    server, outcome = server.step_stacked([0, 1, 2, 3], torch.full((4, SIZE), 1.5), up={"variate": rows})
    assert list(outcome.clipped) == [3]
    assert outcome.arrived == (0, 1, 2, 3)
    assert server.algorithm_state["variate"][3].tolist() == pytest.approx([2.0] * SIZE)


def test_what_was_learned_of_vectors_beside_models_is_in_the_checkpoint() -> None:
    server, _ = beside("scaffold", 4, None)
    fresh, _ = beside("scaffold", 0, None)
    again = with_tensors(fresh, server.round, to_tensors(server))
    assert again.gate_state["beside.variate"].equal(server.gate_state["beside.variate"])
    rows = torch.ones(CLIENTS, SIZE)
    rows[2] = 1e4
    for one in (server, again):
        _, outcome = one.step_stacked(range(CLIENTS), one.model.expand(CLIENTS, -1), up={"variate": rows})
        assert list(outcome.refused) == [2]


@pytest.mark.parametrize(("rule", "mean"), [("safari", 14 / 3), ("drop", 4.0)])
def test_a_server_half_sees_who_stood_in_for_whom(rule: str, mean: float) -> None:
    half = ALGORITHMS["scaffold"](memory="stand-in").server
    assert half is not None
    server = Server.start(torch.zeros(2), 3, rule, algorithm=half_step(half, 3, 2))
    models = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 9.0]])
    variates = torch.tensor([1.0, 2.0, 6.0])[:, None].expand(-1, 2)
    server, _ = server.step_stacked([0, 1, 2], models, up={"variate": variates})
    # Client 0 has moved on to 4 and, with a rule that has stand-ins, speaks for client 1, which was last heard at 2.
    sent = torch.tensor([4.0, 6.0])[:, None].expand(-1, 2)
    server, outcome = server.step_stacked([0, 2], models[[0, 2]], up={"variate": sent})
    assert outcome.stand_ins == ({1: (0,)} if rule == "safari" else {})
    torch.testing.assert_close(half.down(server.algorithm_state)["variate"], torch.full((2,), mean))
