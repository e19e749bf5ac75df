"""A server as tensors and back: what was saved by another server is refused, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from safari.aggregation import RULES, Compensation, Decision, Round, Server, to_tensors, with_tensors
from safari.errors import SafariError

SIZE = 4


def start(rule: str | Compensation = "safari", clients: int = 3, **options: Any) -> Server:
    return Server.start(torch.zeros(SIZE), clients, rule, **options)


def played(server: Server) -> Server:
    generator = torch.Generator().manual_seed(0)
    clients = len(server.weights)
    for ids in (range(clients), range(clients - 1), [0]):
        server, _ = server.step({i: torch.randn(SIZE, generator=generator) for i in ids})
    return server


def step(server: Server) -> Server:
    return server.step({0: torch.ones(SIZE), 1: 2 * torch.ones(SIZE)})[0]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_goes_on_from_what_it_saved(rule: str) -> None:
    server = played(start(RULES[rule]()))
    again = with_tensors(start(RULES[rule]()), server.round, to_tensors(server))
    assert torch.equal(step(server).model, step(again).model)


@pytest.mark.parametrize(
    ("saved", "restored", "text"),
    [
        (
            {},
            {"clients": 5},
            "rule.similarity must be a tensor of shape [5, 5] and torch.float32, "
            "got shape [3, 3] and torch.float32",
        ),
        (
            {},
            {"clients": 2},
            "rule.similarity must be a tensor of shape [2, 2] and torch.float32, "
            "got shape [3, 3] and torch.float32",
        ),
        (
            {},
            {"rule": "drop"},
            "rule.similarity is no part of the state of rule drop: it must have none, got shape [3, 3]; "
            "start the server with the rule that was saved",
        ),
        (
            {},
            {"rule": "mifa"},
            "rule.similarity is no part of the state of rule mifa: it must have rule.updates, rule.kept, "
            "rule.age, got shape [3, 3]; start the server with the rule that was saved",
        ),
        (
            {"rule": "drop"},
            {"rule": "safari"},
            "rule.similarity must be a tensor of shape [3, 3] and torch.float32, got nothing",
        ),
        (
            {"rule": "fdms"},
            {"rule": "safari"},
            "rule.met is no part of the state of rule safari: it must have rule.similarity, "
            "got shape [3, 3]; start the server with the rule that was saved",
        ),
        (
            {"rule": "drop"},
            {"rule": "drop", "clients": 2},
            "gate.norms must be a tensor of shape [2, 2] or less and torch.float64, "
            "got shape [3, 2] and torch.float64",
        ),
    ],
)
def test_the_state_of_another_server_is_refused(
    saved: Mapping[str, Any], restored: Mapping[str, Any], text: str
) -> None:
    tensors = to_tensors(played(start(**saved)))
    with pytest.raises(SafariError) as error:
        with_tensors(start(**restored), 3, tensors)
    assert str(error.value) == text


def test_another_model_is_refused() -> None:
    tensors = to_tensors(played(start("drop")))
    del tensors["model"]
    for wrong, got in (({}, "nothing"), ({"model": torch.zeros(3)}, r"shape \[3\] and torch.float32")):
        with pytest.raises(SafariError, match=rf"^model must be a tensor of shape \[4\] .*, got {got}$"):
            with_tensors(start("drop"), 3, {**tensors, **wrong})


def test_a_rule_of_ones_own_whose_state_grows() -> None:
    def apply(state: dict[str, Tensor], round: Round) -> tuple[Decision, dict[str, Tensor]]:
        seen = state.get("seen", round.arrived[:0])
        return Decision(round.own / round.own.sum()), {"seen": torch.cat([seen, round.arrived])}

    own = Compensation(lambda clients, size, device: {}, apply, name="mine")
    server = played(start(own))
    with pytest.raises(SafariError, match=r"^rule.seen is no part of the state of mine: "):
        with_tensors(start(own), server.round, to_tensors(server))
    again = with_tensors(start(own), server.round, to_tensors(server), any_form=True)
    assert again.state["seen"].tolist() == [0, 1, 2, 0, 1, 0]
    assert torch.equal(step(again).model, step(server).model)
