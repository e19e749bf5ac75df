"""What a server refuses, from clients and to start from, and that it leaves alone what is the caller's."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aggregation.samples import A, B, C, start, vector
from safari.aggregation import RULES, Compensation, Decision, Round, Server
from safari.errors import ConfigError, SafariError

# --- what is refused

NAMES = ", ".join(sorted(RULES.keys() - {"perfect", "attainable", "few"}))


BAD: list[tuple[Any, str]] = [
    (vector(1, math.nan, 2), "1 numbers are NaN or infinite"),
    (vector(math.inf, -math.inf, 2), "2 numbers are NaN or infinite"),
    (np.array([1e300, 0.0, 0.0]), "1 numbers are NaN or infinite"),  # finite, but not in float32
    (vector(1, 2), "expected 3 numbers, got shape (2,)"),
    (vector(1, 2, 3, 4), "expected 3 numbers, got shape (4,)"),
    (vector(1, 2, 3)[None], "expected 3 numbers, got shape (1, 3)"),
    (vector(), "expected 3 numbers, got shape (0,)"),
    (3.0, "expected 3 numbers, got shape ()"),
    (None, "is not an array of real numbers"),
    ("abc", "is not an array of real numbers"),
    ([1.0, [2.0], 3.0], "is not an array of real numbers"),
    (np.array(["a", "b", "c"]), "is not an array of real numbers"),
    (np.array([1, None, 2], dtype=object), "is not an array of real numbers"),
    (torch.tensor([1 + 2j, 0, 0]), "is not an array of real numbers"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD)
@pytest.mark.parametrize("rule", RULES)
def test_a_bad_update_is_refused_recorded_and_as_if_missing(rule: str, bad: Any, reason: str) -> None:
    before, _ = start(rule).step({0: A, 1: B, 2: C})
    server, outcome = before.step({0: A, 1: bad, 2: C})
    expected, without = before.step({0: A, 2: C})
    assert outcome.refused == {1: reason}
    assert outcome.arrived == (0, 2)
    assert outcome.missing == (1,)
    assert outcome.stand_ins == without.stand_ins
    assert torch.equal(server.model, expected.model)
    assert server.model.isfinite().all()
    assert all(torch.equal(server.state[name], t) for name, t in expected.state.items())


def test_every_update_refused_is_a_lost_round() -> None:
    server, outcome = start().step({i: vector(math.nan, 0, 0) for i in range(3)})
    assert outcome.lost
    assert sorted(outcome.refused) == [0, 1, 2]
    assert server.model.tolist() == [1, 1, 1]


@pytest.mark.parametrize("stranger", [2, 3, -1])
def test_who_was_not_asked_is_refused(stranger: int) -> None:
    server, outcome = start().step({0: A, stranger: C}, cohort=[0, 1])
    assert outcome.refused == {stranger: "was not asked in this round"}
    assert outcome.arrived == (0,)
    assert torch.equal(server.model, A)


# --- what goes in stays the caller's


def test_arrays_lists_and_other_dtypes_are_models_too() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        received = {
            0: np.frombuffer(A.numpy().tobytes(), dtype=np.float32),  # read-only, as from a network
            1: B.double(),
            2: [12, 0, 0],
        }
        server, outcome = Server.start(np.ones(3), 3).step(received)  # type: ignore[arg-type]
    assert outcome.refused == {}
    torch.testing.assert_close(server.model, vector(4, 4 / 3, 2))
    assert server.model.dtype == torch.float32


def test_the_server_shares_no_memory_and_no_graph_with_the_caller() -> None:
    array = np.ones(3, dtype=np.float32)
    server = Server.start(array, 3)
    array[:] = 7
    assert server.model.tolist() == [1, 1, 1]
    leaf = torch.ones(3, requires_grad=True)
    server = Server.start(leaf * 2, 3)
    assert not server.model.requires_grad
    model = A.clone().requires_grad_()
    server, _ = server.step({0: model * 1, 1: B, 2: C})
    assert not server.model.requires_grad
    assert not server.state["similarity"].requires_grad


def test_step_leaves_the_old_server_and_the_updates_alone() -> None:
    before, _ = start().step({0: A, 1: B, 2: C})
    model, table = before.model.clone(), before.state["similarity"].clone()
    mine = A.clone()
    first, _ = before.step({0: mine, 2: C})
    assert torch.equal(mine, A)
    assert torch.equal(before.model, model)
    assert torch.equal(before.state["similarity"], table)
    again, _ = before.step({2: C, 0: mine})  # nor does the order of arrival matter
    assert torch.equal(first.model, again.model)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"clients": 0}, "clients must be at least 1, got 0"),
        (
            {"rule": "safary"},
            f"rule must be one of {NAMES}; got 'safary' (did you mean 'safari'?)",
        ),
        (
            {"weights": [1, 2]},
            "weights must hold a positive, finite number for each of the 3 clients, got shape [2]",
        ),
        (
            {"weights": [1, 0, 2]},
            "weights must hold a positive, finite number for each of the 3 clients, got 0.0 for client 1",
        ),
        (
            {"weights": [1, -1, 2]},
            "weights must hold a positive, finite number for each of the 3 clients, got -1.0 for client 1",
        ),
        (
            {"weights": [1, math.nan, 2]},
            "weights must hold a positive, finite number for each of the 3 clients, got nan for client 1",
        ),
        (
            {"weights": [1, math.inf, 2]},
            "weights must hold a positive, finite number for each of the 3 clients, got inf for client 1",
        ),
        (
            {"weights": ["a", 1, 2]},
            "weights must hold a positive, finite number for each of the 3 clients, got ['a', 1, 2]",
        ),
        ({"clients": 2.5}, "clients must be a whole number, got 2.5"),
        ({"clients": "3"}, "clients must be a whole number, got '3'"),
        ({"parameters": 1.5}, "parameters must be a whole number, got 1.5"),
        (
            {"rule": RULES["drop"]},
            "rule must be a name or a Compensation, got a function; call it: rule=drop()",
        ),
        ({"rule": 3}, "rule must be a name or a Compensation, got an int"),
        (
            {"rule": {"rule": "safari+", "memory": False}},
            "rule must be a name or a Compensation, got a dict; "
            "with options: rule=safari.aggregation.RULES[name](option=value)",
        ),
        (
            {"rule": "mine.py:gentle"},
            f"rule must be one of {NAMES}; got 'mine.py:gentle'; "
            "import gentle from mine.py and pass what it returns: rule=gentle()",
        ),
        ({"model": torch.nn.Linear(1, 1)}, "model must be one vector of finite numbers, got a Linear"),
        ({"model": ["a"]}, "model must be one vector of finite numbers, got a list"),
        ({"parameters": 4}, "parameters must lie between 1 and the model's 3 numbers, got 4"),
        ({"parameters": 0}, "parameters must lie between 1 and the model's 3 numbers, got 0"),
        ({"parameters": -1}, "parameters must lie between 1 and the model's 3 numbers, got -1"),
        (
            {"model": torch.zeros(2, 2)},
            "model must be one vector of finite numbers, got shape (2, 2) with 0 numbers NaN or infinite",
        ),
        (
            {"model": torch.zeros(0)},
            "model must be one vector of finite numbers, got shape (0,) with 0 numbers NaN or infinite",
        ),
        (
            {"model": vector(1, math.nan)},
            "model must be one vector of finite numbers, got shape (2,) with 1 numbers NaN or infinite",
        ),
    ],
)
def test_what_a_server_cannot_start_from(options: dict[str, Any], text: str) -> None:
    with pytest.raises(SafariError) as error:
        Server.start(**{"model": torch.ones(3), "clients": 3, **options})
    assert str(error.value) == text


def test_too_many_clients_for_a_matrix_of_pairs() -> None:
    with pytest.raises(ConfigError) as error:
        Server.start(torch.zeros(1), 20_001, "safari")
    assert str(error.value) == (
        "clients must be at most 20000 for the rule safari, which remembers every pair; got 20001"
    )
    Server.start(torch.zeros(1), 20_001, "drop")


def test_only_the_reference_and_its_oracle_override_the_network() -> None:
    assert {name for name, rule in RULES.items() if rule().overrides_network} == {
        "perfect",
        "attainable",
        "few",
    }


@pytest.mark.parametrize("name", ["perfect", "attainable", "few"])
def test_an_oracle_needs_the_simulator(name: str) -> None:
    """Without it an oracle would be `drop` under another name."""
    with pytest.raises(SafariError, match=f"^rule {name} is an oracle of the simulator, .* use drop"):
        Server.start(torch.ones(3), 3, name)
    # The simulator itself, which does train everybody, passes the rule.
    assert Server.start(torch.ones(3), 3, RULES[name]()).rule.overrides_network


def test_a_rule_with_options() -> None:
    server = Server.start(torch.ones(3), 3, RULES["safari+"](memory=False))
    _, outcome = server.step({0: vector(1, 1, 2), 1: vector(1, 2, 1)})
    assert outcome.missing == (2,)


def test_a_users_rule_with_a_memory() -> None:
    """x + Σ a Δ + Σ b (z - x): a third of each arrival's step, and half of the way to the recalled model."""

    def apply(state: dict[str, Tensor], round: Round) -> tuple[Decision, dict[str, Tensor]]:
        share = torch.full((len(round.arrived),), 1 / 3, dtype=torch.float64)
        return Decision(share, torch.tensor([0.5]), state["memory"]), {"memory": state["memory"] + 1}

    rule = Compensation(lambda clients, size, device: {"memory": torch.full((1, size), 2.0)}, apply)
    server, outcome = Server.start(vector(3, 3, 3), 3, rule).step({1: vector(6, 3, 9)})
    torch.testing.assert_close(server.model, vector(3 + 1 - 0.5, 3 - 0.5, 3 + 2 - 0.5))
    assert outcome.stand_ins == {}
    assert server.state["memory"].tolist() == [[3, 3, 3]]
