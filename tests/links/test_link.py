"""`from_probability` with a user's functions: numbers that are not probabilities are reported, not drawn from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from safari.errors import ConfigError
from safari.links import Setting, from_probability


def setting(clients: int = 3) -> Setting:
    return Setting(clients, np.zeros((clients, 1), np.int64), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("p", "text"),
    [
        ([1, 0.5, 2.0], "the probability of client 2 must lie between 0 and 1, got 2.0 at the start"),
        ([1, -0.1, 2.0], "the probability of client 1 must lie between 0 and 1, got -0.1 at the start"),
        ([math.nan, 0, 0], "the probability of client 0 must lie between 0 and 1, got nan at the start"),
        ([0.5, 0.5], "there must be a probability for each of the 3 clients, got shape [2]"),
        (0.5, "there must be a probability for each of the 3 clients, got shape []"),
    ],
)
def test_a_start_that_is_no_probability(p: Any, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_probability(lambda s: p).init(setting())
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (np.array([0, 1, 1.5]), "the probability of client 2 must lie between 0 and 1, got 1.5 in round 7"),
        (
            np.array([0, math.nan, 0]),
            "the probability of client 1 must lie between 0 and 1, got nan in round 7",
        ),
        (np.ones(2), "there must be a probability for each of the 3 clients, got shape [2] in round 7"),
        (0.5, "there must be a probability for each of the 3 clients, got shape [] in round 7"),
    ],
)
def test_a_schedule_that_leaves_the_range(p: Any, text: str) -> None:
    link = from_probability(lambda s: np.full(s.clients, 0.5), lambda base, t: p if t == 7 else base)
    state = link.init(setting())
    delivered, state = link.apply(state, 6, np.random.default_rng(0))
    assert delivered.shape == (3,)
    with pytest.raises(ConfigError) as error:
        link.apply(state, 7, np.random.default_rng(0))
    assert str(error.value) == text


def test_a_list_will_do_and_so_will_a_rounding_above_one() -> None:
    link = from_probability(lambda s: [1, 0, 1 + 1e-12])  # type: ignore[arg-type, return-value]
    state = link.init(setting())
    assert isinstance(state["p"], np.ndarray)
    delivered, _ = link.apply(state, 0, np.random.default_rng(0))
    assert delivered.tolist() == [True, False, True]
