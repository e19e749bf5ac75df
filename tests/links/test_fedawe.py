"""FedAWE's links: probabilities by hand, for each of the four dynamics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from safari.errors import ConfigError
from safari.links import LINKS, Setting

# Client 0 holds the first class alone, 1 the last, 2 half of each.
COUNTS = np.array([[10, 0, 0, 0], [0, 0, 0, 10], [5, 0, 0, 5]])


class AlwaysHalf:
    """A generator whose uniform draws are the middles of their ranges."""

    def uniform(self, low: float, high: np.ndarray) -> np.ndarray:
        return (low + np.asarray(high)) / 2


def chances(t: int, **options: Any) -> list[float]:
    """The probabilities in a round, as thresholds of the draws: found by asking with every 1/1000."""
    link = LINKS["fedawe"](**options)
    state = link.init(Setting(3, COUNTS, AlwaysHalf()))  # type: ignore[arg-type]

    class Fixed:
        def __init__(self, value: float):
            self.value = value

        def random(self, count: int) -> np.ndarray:
            return np.full(count, self.value)

    asked = [(k + 0.5) / 1000 for k in range(1000)]
    return np.mean([link.apply(state, t, Fixed(v))[0] for v in asked], axis=0).tolist()  # type: ignore[arg-type]


def test_probabilities_follow_the_labels() -> None:
    # Middles of [0, 1] and [0, 0.5].
    assert chances(7, dynamics="stationary") == pytest.approx([0.5, 0.25, 0.375], abs=1e-3)
    assert chances(7, dynamics="stationary", halves=[0.2, 0.8]) == pytest.approx([0.1, 0.4, 0.25], abs=1e-3)


@pytest.mark.parametrize(("t", "factor"), [(0, 1.0), (9, 1.0), (10, 0.4), (19, 0.4), (20, 1.0)])
def test_a_staircase_has_two_levels(t: int, factor: float) -> None:
    assert chances(t, dynamics="staircase") == pytest.approx(
        [0.5 * factor, 0.25 * factor, 0.375 * factor], abs=1e-3
    )


@pytest.mark.parametrize("t", [0, 5, 12, 15, 20])
def test_a_wave_has_a_period_of_twenty_rounds(t: int) -> None:
    factor = 0.7 + 0.3 * math.sin(2 * math.pi * t / 20)
    assert chances(t, dynamics="sine") == pytest.approx(
        [0.5 * factor, 0.25 * factor, 0.375 * factor], abs=1e-3
    )


def test_interleaved_clients_fall_silent_below_the_cutoff() -> None:
    # In round 15 the wave is at 0.4: 0.2, 0.1 and 0.15 are left.
    assert chances(15, dynamics="interleaved", cutoff=0.12) == pytest.approx([0.2, 0.0, 0.15], abs=1e-3)
    assert chances(15, dynamics="interleaved", cutoff=0.18) == pytest.approx([0.2, 0.0, 0.0], abs=1e-3)
    assert chances(5, dynamics="interleaved", cutoff=0.12) == pytest.approx([0.5, 0.25, 0.375], abs=1e-3)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"period": 7}, "period must be an even number of at least 2 rounds, got 7"),
        ({"period": 0}, "period must be an even number of at least 2 rounds, got 0"),
        ({"halves": [1.0]}, "halves must hold two numbers, got 1"),
        ({"halves": [1.0, 1.5]}, "halves must lie between 0 and 1, got 1.5"),
        ({"depth": 2.0}, "depth must lie between 0 and 1, got 2.0"),
        ({"low": -0.1}, "low must lie between 0 and 1, got -0.1"),
        ({"cutoff": 1.1}, "cutoff must lie between 0 and 1, got 1.1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        LINKS["fedawe"](**options)
    assert str(error.value) == problem


def test_an_unknown_dynamic_is_refused_by_name() -> None:
    from safari.config import parse
    from safari.engine import check

    (problem,) = check(parse({"uplink": {"name": "fedawe", "dynamics": "cosine"}}))
    assert "dynamics" in problem
    assert "'cosine'" in problem
