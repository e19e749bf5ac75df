"""Rules and callers that are wrong, by message; and ids of other libraries, which are fine."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from aggregation.samples import A, B, start, vector
from safari.aggregation import Compensation, Decision, Round, Server
from safari.errors import ConfigError, SafariError

EQUAL = torch.full((2,), 1 / 3)


def step(answer: Callable[[Round], Any], **names: str) -> None:
    """A round of three clients in which 0 and 1 arrive, by a rule that answers so."""
    rule = Compensation(lambda clients, size, device: {}, lambda state, round: answer(round), **names)
    Server.start(torch.zeros(3), 3, rule).step({0: A, 1: B})


WRONG: list[tuple[Any, str]] = [
    (None, "apply must return (Decision, state), got None"),
    (Decision(EQUAL), "apply must return (Decision, state), got a Decision"),
    ((EQUAL, {}), "apply must return (Decision, state), got a tuple of a tensor of shape [2] and a dict"),
    (
        (Decision(torch.ones(7)), {}),
        "a must be a tensor on cpu with a weight for each of the 2 arrivals, "
        "got a tensor of shape [7], torch.float32 on cpu",
    ),
    (
        (Decision([0.5, 0.5]), {}),  # type: ignore[arg-type]
        "a must be a tensor on cpu with a weight for each of the 2 arrivals, got a list",
    ),
    (
        (Decision(EQUAL.to(torch.complex64)), {}),
        "a must be a tensor on cpu with a weight for each of the 2 arrivals, "
        "got a tensor of shape [2], torch.complex64 on cpu",
    ),
    (
        (Decision(EQUAL, torch.ones(2), torch.zeros(1, 3)), {}),
        "b must be a tensor on cpu with a weight for each of the 1 rows of recalled, "
        "got a tensor of shape [2], torch.float32 on cpu",
    ),
    (
        (Decision(EQUAL, torch.ones(1), torch.zeros(1, 2)), {}),
        "recalled must be a matrix with a model of 3 numbers in each row, torch.float32 on cpu; "
        "got shape [1, 2], torch.float32 on cpu",
    ),
    (
        (Decision(EQUAL, torch.ones(1), torch.zeros(1, 3, dtype=torch.float64)), {}),
        "recalled must be a matrix with a model of 3 numbers in each row, torch.float32 on cpu; "
        "got shape [1, 3], torch.float64 on cpu",
    ),
    (
        (Decision(EQUAL, torch.ones(1)), {}),
        "b and recalled belong together, a weight and a model each; got a tensor of shape [1] and None",
    ),
    (
        (Decision(EQUAL, None, torch.zeros(1, 3)), {}),
        "b and recalled belong together, a weight and a model each; got None and a tensor of shape [1, 3]",
    ),
    (
        (Decision(EQUAL, stand_ins=[2]), {}),  # type: ignore[arg-type]
        "stand_ins must map missing clients to arrivals, got a list",
    ),
    ((Decision(EQUAL * math.nan), {}), "weights a must be finite, got 2 numbers NaN or infinite in round 0"),
    (
        (Decision(torch.tensor([math.inf, -math.inf])), {}),
        "weights a must be finite, got 2 numbers NaN or infinite in round 0",
    ),
    (
        (Decision(EQUAL, torch.tensor([math.nan]), torch.zeros(1, 3)), {}),
        "weights b must be finite, got 1 numbers NaN or infinite in round 0",
    ),
    (
        (Decision(EQUAL, torch.ones(1), torch.tensor([[0.0, math.inf, 0.0]])), {}),
        "models recalled must be finite, got 1 numbers NaN or infinite in round 0",
    ),
    (
        (Decision(torch.tensor([3e38, 0.0])), {}),
        "the new model must be finite, got 1 numbers NaN or infinite in round 0: its weights are too large",
    ),
    ((Decision(EQUAL), [1]), "the state that apply returns must be a dict, got a list"),
    (
        (Decision(EQUAL), {"seen": 1}),
        "the state that apply returns must hold tensors by name, got an int as 'seen'",
    ),
]


@pytest.mark.parametrize(("answer", "text"), WRONG)
def test_a_wrong_return_value_of_a_rule_is_reported(answer: Any, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        step(lambda round: answer)
    assert str(error.value) == f"the rule: {text}"
    with pytest.raises(ConfigError) as error:
        step(lambda round: answer, name="mine")
    assert str(error.value) == f"mine: {text}"


def test_a_first_state_that_no_checkpoint_could_hold() -> None:
    for state, text in (
        ([1], "the rule: the state that init returns must be a dict, got a list"),
        ({"a": 1}, "the rule: the state that init returns must hold tensors by name, got an int as 'a'"),
        (
            {1: A},
            "the rule: the state that init returns must hold tensors by name, got a tensor of shape [3] as 1",
        ),
    ):
        rule = Compensation(lambda clients, size, device, state=state: state, lambda state, round: None)  # type: ignore[arg-type, return-value]
        with pytest.raises(ConfigError) as error:
            Server.start(torch.zeros(3), 3, rule)
        assert str(error.value) == text


def test_a_large_model_is_no_mistake_of_the_rule() -> None:
    """The sum over a model's numbers is beyond float32, each number is not."""
    server, outcome = start("drop", gate="off").step({0: vector(3e38, 3e38, 3e38)})
    assert outcome.arrived == (0,)
    assert server.model.tolist() == vector(3e38, 3e38, 3e38).tolist()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([A, B],), "received must map client ids to models, got a list"),
        (({"0": A},), "a client id in received must be a whole number, got '0'"),
        (({0.5: A},), "a client id in received must be a whole number, got 0.5"),
        (({0: A}, "01"), "cohort must hold client ids, whole numbers; got a str"),
        (({0: A}, 3), "cohort must hold client ids, whole numbers; got an int"),
        (({0: A}, [0, 1.5]), "a client id in cohort must be a whole number, got 1.5"),
    ],
)
def test_what_a_server_cannot_step_with(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(SafariError) as error:
        start().step(*arguments)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("ids", "models", "text"),
    [
        ([1, 0], torch.zeros(2, 3), "ids must ascend and be of clients that were asked, got [1, 0]"),
        ([0, 0], torch.zeros(2, 3), "ids must ascend and be of clients that were asked, got [0, 0]"),
        ([0, 2], torch.zeros(2, 3), "ids must ascend and be of clients that were asked, got [0, 2]"),
        (["0"], torch.zeros(1, 3), "a client id in ids must be a whole number, got '0'"),
        (
            [0, 1],
            torch.zeros(1, 3),
            "models must be a tensor of shape [2, 3], a row for each id, got a tensor of shape [1, 3]",
        ),
    ],
)
def test_what_cannot_be_a_stack(ids: list[int], models: torch.Tensor, text: str) -> None:
    with pytest.raises(SafariError) as error:
        start().step_stacked(ids, models, cohort=[0, 1])
    assert str(error.value) == text


def test_ids_of_other_libraries_come_out_as_numbers_that_json_can_write() -> None:
    ids = np.array([0, 2])
    server = start("safari")
    _, outcome = server.step({ids[0]: A, torch.tensor(2): B, np.int8(9): A}, np.arange(3))
    assert json.dumps([outcome.arrived, outcome.missing, outcome.stand_ins, outcome.refused]) == (
        '[[0, 2], [1], {"1": [0, 2]}, {"9": "was not asked in this round"}]'
    )
    _, stacked = server.step_stacked(ids, torch.stack([A, B]), np.arange(3))
    assert json.dumps([stacked.arrived, stacked.missing]) == "[[0, 2], [1]]"
