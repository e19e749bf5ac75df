"""What every link must keep to, built in or a user's: one table, the same tests for all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safari.links import LINKS, Link, Setting

CLIENTS, ROUNDS, CLASSES = 10, 400, 5
P = [1, 0.3, 0.3, 0.3, 0.3]

# name -> options; "trace" gets a file of its own.
OPTIONS: dict[str, dict[str, Any]] = {
    "perfect": {},
    "lost": {},
    "bernoulli": {"p": P},
    "staircase": {"p": 0.9, "levels": [1.0, 0.4], "every": 10},
    "sine": {"p": P, "depth": 0.5, "period": 40},
    "interleaved": {"p": P, "depth": 0.5, "period": 40},
    "labels": {},
    "gilbert-elliott": {"p": [0.9, 0.3, 0.3, 0.3, 0.3], "burst": 4, "good": 0.95, "bad": 0.05},
    "silence": {"p": P, "who": [0, 1, 2], "start": 5, "stop": 9, "every": 20},
    "come-and-go": {"p": P, "stay": 20.0, "away": 10.0},
    "fedawe": {"dynamics": "interleaved"},
    "trace": {"after": "repeat"},
}


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest, tmp_path: Path) -> Link:
    options = dict(OPTIONS[request.param])
    if request.param == "trace":
        file = tmp_path / "trace.csv"
        rows = [f"{t},{c},{(t + c) % 3 == 0:d}" for t in range(30) for c in range(CLIENTS)]
        file.write_text("\n".join(["round,client,delivered", *rows]))
        options["file"] = str(file)
    return LINKS[request.param](**options)


def counts(clients: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 30, (100, CLASSES))[:clients]


def setting(clients: int = CLIENTS, seed: int = 0) -> Setting:
    return Setting(clients, counts(clients), np.random.default_rng(seed))


def history(link: Link, clients: int = CLIENTS, seed: int = 0, rounds: int = ROUNDS) -> np.ndarray:
    state = link.init(setting(clients, seed))
    out = []
    for t in range(rounds):
        delivered, state = link.apply(state, t, np.random.default_rng([seed, 1, t]))
        out.append(delivered)
    return np.array(out)


def test_the_table_has_every_link() -> None:
    assert OPTIONS.keys() == LINKS.keys()


def test_the_same_seed_gives_the_same_history(link: Link) -> None:
    assert np.array_equal(history(link, seed=3), history(link, seed=3))


@pytest.mark.parametrize("name", sorted(set(LINKS) - {"perfect", "lost", "trace"}))
def test_another_seed_gives_another_history(name: str) -> None:
    link = LINKS[name](**OPTIONS[name])
    assert not np.array_equal(history(link, seed=3), history(link, seed=4))


@pytest.mark.parametrize("name", sorted(set(LINKS) - {"interleaved", "trace"}))
def test_adding_clients_does_not_change_the_draws_of_others(name: str) -> None:
    """Not for interleaved, where the phases share out the circle, nor for a trace, which has its clients."""
    link = LINKS[name](**OPTIONS[name])
    few, many = history(link, 10), history(link, 15)
    assert np.array_equal(few, many[:, :10])


def expected_probability(name: str) -> np.ndarray:
    """By hand: the mean over all rounds of each client's chance."""
    base = np.array(P * 2)
    # Whole periods: the sine averages to 0, and with depth 0.5 it never reaches the floor.
    return {
        "perfect": np.ones(10),
        "lost": np.zeros(10),
        "bernoulli": base,
        "staircase": np.full(10, 0.9 * (1.0 + 0.4) / 2),
        "sine": base * 0.5,
    }[name]


@pytest.mark.parametrize("name", ["perfect", "lost", "bernoulli", "staircase", "sine"])
def test_long_run_frequency(name: str) -> None:
    """Independent draws: within 5 standard deviations of a sum of Bernoullis, which p(1-p) bounds."""
    rounds = 4000
    p = expected_probability(name)
    seen = history(LINKS[name](**OPTIONS[name]), rounds=rounds).mean(0)
    bound = 5 * np.sqrt(p * (1 - p) / rounds)
    assert (np.abs(seen - p) <= bound).all(), (seen, p, bound)


def test_long_run_frequency_of_labels() -> None:
    rounds, chances = 4000, [0.1, 0.9, 0.5, 0.0, 1.0]
    seen = history(LINKS["labels"](p=chances), rounds=rounds).mean(0)
    for client, row in enumerate(counts(CLIENTS).tolist()):
        p = sum(n * q for n, q in zip(row, chances, strict=True)) / sum(row)
        assert abs(seen[client] - p) <= 5 * math.sqrt(p * (1 - p) / rounds)


def test_draws_of_different_rounds_and_clients_are_independent() -> None:
    """Neighbours in time and clients agree as often as p² + (1-p)² says."""
    seen = history(LINKS["bernoulli"](p=0.3), rounds=4000)
    agree = 0.3**2 + 0.7**2
    n = seen[1:].size
    bound = 5 * math.sqrt(agree * (1 - agree) / n)
    assert abs((seen[1:] == seen[:-1]).mean() - agree) <= bound
    n = seen[:, 1:].size
    assert abs((seen[:, 1:] == seen[:, :-1]).mean() - agree) <= 5 * math.sqrt(agree * (1 - agree) / n)
