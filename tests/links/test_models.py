"""Each link's probabilities by hand, bursts against theory, and every error's text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safari.errors import ConfigError
from safari.links import LINKS, Link, Setting, from_probability, probabilities, spread


class Dial:
    """A generator whose every draw is one number: a client gets through where its chance is above it."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self, shape: int | tuple[int, ...]) -> np.ndarray:
        return np.full(shape, self.value)


def setting(clients: int, labels: Any = None, seed: int = 0) -> Setting:
    counts = np.ones((clients, 3), dtype=np.int64) if labels is None else np.asarray(labels)
    return Setting(clients, counts, np.random.default_rng(seed))


def chances(link: Link, t: int, clients: int, labels: Any = None) -> list[float]:
    """Each client's probability in round t, found by turning the dial until it no longer gets through."""
    state = link.init(setting(clients, labels))
    low, high = np.zeros(clients), np.ones(clients)
    for _ in range(40):
        middle = (low + high) / 2
        through = np.array([link.apply(state, t, Dial(m))[0][c] for c, m in enumerate(middle)])  # type: ignore[arg-type]
        low, high = np.where(through, middle, low), np.where(through, high, middle)
    return [float(x) for x in high]


def test_perfect_and_lost_whatever_the_luck() -> None:
    for dial in (0.0, 0.5, math.nextafter(1.0, 0.0)):
        for name, outcome in (("perfect", True), ("lost", False)):
            link = LINKS[name]()
            delivered, _ = link.apply(link.init(setting(3)), 0, Dial(dial))  # type: ignore[arg-type]
            assert delivered.tolist() == [outcome] * 3


def test_bernoulli_repeats_its_list() -> None:
    link = LINKS["bernoulli"](p=[1, 0.3, 0.3, 0.3, 0.3])
    assert chances(link, 0, 10) == pytest.approx([1, 0.3, 0.3, 0.3, 0.3] * 2)
    assert chances(link, 77, 10) == pytest.approx([1, 0.3, 0.3, 0.3, 0.3] * 2)
    assert chances(LINKS["bernoulli"](p=0.25), 0, 3) == pytest.approx([0.25] * 3)
    assert chances(LINKS["bernoulli"](), 0, 2) == pytest.approx([0.3, 0.3])


def test_staircase_by_hand() -> None:
    link = LINKS["staircase"](p=[0.8, 0.4], levels=[1.0, 0.5, 0.0], every=2)
    table = {0: [0.8, 0.4], 1: [0.8, 0.4], 2: [0.4, 0.2], 3: [0.4, 0.2], 4: [0, 0], 5: [0, 0], 6: [0.8, 0.4]}
    for t, expected in table.items():
        assert chances(link, t, 2) == pytest.approx(expected, abs=1e-9), t


def test_sine_by_hand() -> None:
    """0.8 · (1 - d + d sin(2πt/T)) with d = 0.5 and T = 8."""
    link = LINKS["sine"](p=[0.8, 0.4], depth=0.5, period=8)
    half = math.sqrt(0.5)
    waves = [0.5, 0.5 + 0.5 * half, 1.0, 0.5 + 0.5 * half, 0.5, 0.5 - 0.5 * half, 0.0, 0.5 - 0.5 * half, 0.5]
    for t, wave in enumerate(waves):
        assert chances(link, t, 2) == pytest.approx([0.8 * wave, 0.4 * wave], abs=1e-9), t


def test_a_deep_sine_stops_at_zero() -> None:
    """With d = 0.6 the wave would go down to 1 - 2·0.6 = -0.2."""
    link = LINKS["sine"](p=1.0, depth=0.6, period=4)
    assert chances(link, 1, 1) == pytest.approx([1.0])
    assert chances(link, 3, 1) == pytest.approx([0.0], abs=1e-9)
    flat = LINKS["sine"](p=0.7, depth=0.0, period=4)
    assert [chances(flat, t, 1)[0] for t in range(4)] == pytest.approx([0.7] * 4)


def test_interleaved_by_hand() -> None:
    """Four clients a quarter of the period apart, so that each is at the top in turn; below 0.1 silent."""
    link = LINKS["interleaved"](p=1.0, depth=0.5, period=4, cutoff=0.1)
    assert chances(link, 0, 4) == pytest.approx([0.5, 1.0, 0.5, 0.0], abs=1e-9)
    assert chances(link, 1, 4) == pytest.approx([1.0, 0.5, 0.0, 0.5], abs=1e-9)
    assert chances(link, 2, 4) == pytest.approx([0.5, 0.0, 0.5, 1.0], abs=1e-9)
    assert chances(link, 3, 4) == pytest.approx([0.0, 0.5, 1.0, 0.5], abs=1e-9)


def test_interleaved_cuts_off_what_is_low() -> None:
    wave = 0.5 - 0.5 * math.sqrt(0.5)  # 0.146
    for cutoff, expected in ((0.1, wave), (0.15, 0.0), (0.0, wave), (1.0, 0.0)):
        link = LINKS["interleaved"](p=1.0, depth=0.5, period=8, cutoff=cutoff)
        assert chances(link, 5, 1) == pytest.approx([expected], abs=1e-9)


def test_labels_by_hand() -> None:
    """A client's chance is the mean over its samples of their labels' chances."""
    counts = [[10, 0, 0], [0, 5, 5], [1, 2, 1], [0, 0, 0]]
    link = LINKS["labels"](p=[0.2, 0.4, 1.0])
    assert chances(link, 0, 4, counts) == pytest.approx([0.2, 0.7, (0.2 + 0.8 + 1.0) / 4, 0.0], abs=1e-9)


def test_labels_drawn_between_low_and_high_and_kept() -> None:
    link = LINKS["labels"](low=0.4, high=0.6)
    one_label_each = np.eye(3, dtype=np.int64) * 7
    drawn = chances(link, 0, 3, one_label_each)
    assert all(0.4 <= p <= 0.6 for p in drawn)
    assert len(set(drawn)) == 3
    assert chances(link, 99, 3, one_label_each) == drawn
    same = LINKS["labels"](low=0.5, high=0.5)
    assert chances(same, 0, 3, one_label_each) == pytest.approx([0.5] * 3)


# --- bursts


CHAINS, LONG = 40, 1500


def bursts(p: float, burst: float, **options: float) -> tuple[float, list[int]]:
    """Share of rounds that got through, and the lengths of all complete runs of losses."""
    link = LINKS["gilbert-elliott"](p=p, burst=burst, **options)
    state = link.init(setting(CHAINS))
    rng = np.random.default_rng(1)
    seen = []
    for t in range(LONG):
        delivered, state = link.apply(state, t, rng)
        seen.append(delivered)
    runs = []
    for chain in np.transpose(seen).tolist():
        length = 0
        for through in chain:
            if through and length:
                runs.append(length)
            length = 0 if through else length + 1
    return float(np.mean(seen)), runs


@pytest.mark.parametrize(("p", "burst"), [(0.3, 5.0), (0.5, 1.0), (0.9, 3.0), (0.7, 20.0)])
def test_bursts_are_as_long_and_losses_as_many_as_theory_says(p: float, burst: float) -> None:
    """Bad spells are geometric with mean `burst` and variance burst² - burst; the share of success is p.

    A two-state chain that leaves good with g and bad with b forgets with λ = 1 - g - b, so the variance
    of the share over n rounds is p(1-p)/n · (1+λ)/(1-λ).
    """
    rounds = CHAINS * LONG
    share, runs = bursts(p, burst)
    b = 1 / burst
    g = b * (1 - p) / p
    memory = 1 - g - b
    sigma = math.sqrt(p * (1 - p) / rounds * (1 + memory) / (1 - memory))
    assert abs(share - p) <= 5 * sigma
    assert abs(np.mean(runs) - burst) <= 5 * math.sqrt((burst**2 - burst) / len(runs)) + 1e-12


def test_with_noisy_spells_the_long_run_is_still_p() -> None:
    p, good, bad, burst, rounds = 0.6, 0.9, 0.2, 4.0, CHAINS * LONG
    share, _ = bursts(p, burst, good=good, bad=bad)
    in_good = (p - bad) / (good - bad)
    b = 1 / burst
    memory = 1 - b - b * (1 - in_good) / in_good
    spells = (good - bad) ** 2 * in_good * (1 - in_good) * (1 + memory) / (1 - memory)
    noise = in_good * good * (1 - good) + (1 - in_good) * bad * (1 - bad)
    assert abs(share - p) <= 5 * math.sqrt((spells + noise) / rounds)


def test_bursts_start_in_the_long_run() -> None:
    """The first round is no special one: over many clients the share that gets through is p."""
    clients = 40_000
    link = LINKS["gilbert-elliott"](p=0.3, burst=10)
    state = link.init(setting(clients))
    for t in range(3):
        delivered, state = link.apply(state, t, np.random.default_rng([1, t]))
        assert abs(delivered.mean() - 0.3) <= 5 * math.sqrt(0.3 * 0.7 / clients)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_certain_bursts(p: float) -> None:
    link = LINKS["gilbert-elliott"](p=p, burst=3)
    state = link.init(setting(50))
    for t in range(50):
        delivered, state = link.apply(state, t, np.random.default_rng(t))
        assert delivered.all() if p else not delivered.any()


# --- helpers and errors


@given(p=st.lists(st.floats(0, 1), min_size=1, max_size=6), times=st.integers(1, 5))
def test_spread_repeats_to_fit(p: list[float], times: int) -> None:
    out = spread("p", p, len(p) * times)
    assert out.tolist() == p * times
    assert out.dtype == np.float64


def test_a_users_schedule_sees_the_round() -> None:
    link = from_probability(lambda s: np.linspace(0, 1, s.clients), lambda p, t: p if t % 2 else 1 - p)
    assert chances(link, 0, 3) == pytest.approx([1, 0.5, 0], abs=1e-9)
    assert chances(link, 1, 3) == pytest.approx([0, 0.5, 1], abs=1e-9)


def make(name: str, clients: int = 10, **options: Any) -> Callable[[], object]:
    return lambda: LINKS[name](**options).init(setting(clients))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (make("bernoulli", p=1.5), "p must lie between 0 and 1, got 1.5"),
        (make("bernoulli", p=[0.3, -0.1]), "p must lie between 0 and 1, got -0.1"),
        (make("bernoulli", p=math.nan), "p must lie between 0 and 1, got nan"),
        (make("bernoulli", p=[]), "p must hold at least one number, got an empty list"),
        (
            make("bernoulli", p=[0.1, 0.2, 0.3]),
            "p must hold one number or a list whose length divides the 10 clients; got 3 numbers",
        ),
        (
            make("bernoulli", clients=2, p=[0.1] * 4),
            "p must hold one number or a list whose length divides the 2 clients; got 4 numbers",
        ),
        (make("staircase", p=2), "p must lie between 0 and 1, got 2.0"),
        (make("staircase", levels=[1, 1.1]), "levels must lie between 0 and 1, got 1.1"),
        (make("staircase", levels=[]), "levels must hold at least one number, got an empty list"),
        (make("staircase", every=0), "every must be at least 1, got 0"),
        (make("sine", p=-1), "p must lie between 0 and 1, got -1.0"),
        (make("sine", depth=1.2), "depth must lie between 0 and 1, got 1.2"),
        (make("sine", period=1), "period must be at least 2, got 1"),
        (make("interleaved", p=7), "p must lie between 0 and 1, got 7.0"),
        (make("interleaved", depth=-0.5), "depth must lie between 0 and 1, got -0.5"),
        (make("interleaved", cutoff=3), "cutoff must lie between 0 and 1, got 3.0"),
        (make("interleaved", period=0), "period must be at least 2, got 0"),
        (make("labels", low=-1), "low must lie between 0 and 1, got -1.0"),
        (make("labels", high=2), "high must lie between 0 and 1, got 2.0"),
        (make("labels", low=0.8, high=0.2), "high must be at least low (0.8), got 0.2"),
        (make("labels", p=[0.5, 2, 0]), "p must lie between 0 and 1, got 2.0"),
        (make("labels", p=[0.5]), "p must hold a number for each of the 3 classes, got 1 numbers"),
        (make("gilbert-elliott", p=1.5), "p must lie between 0 and 1, got 1.5"),
        (make("gilbert-elliott", good=1.5), "good must lie between 0 and 1, got 1.5"),
        (make("gilbert-elliott", bad=-1), "bad must lie between 0 and 1, got -1.0"),
        (make("gilbert-elliott", good=0.2, bad=0.2), "good must be above bad (0.2), got 0.2"),
        (make("gilbert-elliott", burst=0.5), "burst must be at least 1, got 0.5"),
        (make("gilbert-elliott", burst=math.nan), "burst must be at least 1, got nan"),
        (
            make("gilbert-elliott", p=[0.5, 0.95], good=0.9, bad=0.1),
            "p must lie between bad (0.1) and good (0.9), got 0.95",
        ),
        (make("gilbert-elliott", p=0.1, burst=5), "burst must be at least 9.0 to reach p = 0.1, got 5"),
        (
            make("gilbert-elliott", p=0.3, burst=2.33),
            "burst must be at least 2.34 to reach p = 0.3, got 2.33",
        ),
        (make("silence", p=2), "p must lie between 0 and 1, got 2.0"),
        (make("silence", start=-1), "start must be at least 0, got -1"),
        (make("silence", start=7, stop=7), "stop must be above start (7), got 7"),
        (make("silence", start=1, stop=7, every=6), "every must be 0 or at least stop (7), got 6"),
        (make("silence", who=[]), "who must name at least one client, got an empty list"),
        (make("silence", who=[3, 10]), "who must hold ids from 0 to 9, got 10"),
        (make("come-and-go", p=-1), "p must lie between 0 and 1, got -1.0"),
        (make("come-and-go", stay=0.5), "stay must be at least 1, got 0.5"),
        (make("come-and-go", away=math.nan), "away must be at least 1, got nan"),
    ],
)
def test_errors_name_the_option_the_limit_and_the_value(build: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        build()
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("every", "silent"), [(0, {3, 4, 5}), (10, {3, 4, 5, 13, 14, 15}), (6, {3, 4, 5, 9, 10, 11, 15, 16, 17})]
)
def test_silence_takes_these_clients_in_these_rounds_alone(every: int, silent: set[int]) -> None:
    link = LINKS["silence"](p=[1.0, 0.5, 1.0], who=[0, 1], start=3, stop=6, every=every)
    for t in range(18):
        wanted = [0.0, 0.0, 1.0] if t in silent else [1.0, 0.5, 1.0]
        assert chances(link, t, 3) == pytest.approx(wanted)


def test_come_and_go_has_stretches_of_the_lengths_asked_for() -> None:
    """With p = 1 a client's presence can be seen: geometric stretches, within 5 standard errors."""
    stay, away, rounds, clients = 12.0, 4.0, 4000, 50
    link = LINKS["come-and-go"](p=1.0, stay=stay, away=away)
    rng, state, seen = np.random.default_rng(1), link.init(setting(clients)), []
    for t in range(rounds):
        delivered, state = link.apply(state, t, rng)
        seen.append(delivered)
    found: dict[bool, list[int]] = {True: [], False: []}
    for row in np.array(seen).T:
        cuts = np.flatnonzero(np.diff(row)) + 1
        for stretch in np.split(row, cuts)[1:-1]:
            found[bool(stretch[0])].append(len(stretch))
    for present, mean in ((True, stay), (False, away)):
        lengths = found[present]
        error = math.sqrt(mean * (mean - 1) / len(lengths))
        assert abs(np.mean(lengths) - mean) < 5 * error


def test_come_and_go_loses_messages_of_those_who_are_there() -> None:
    link = LINKS["come-and-go"](p=0.25, stay=1e12, away=1.0)
    state = link.init(setting(4000))
    delivered, _ = link.apply(state, 0, np.random.default_rng(2))
    assert abs(delivered.mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 4000)


@given(p=st.floats(0.01, 0.99))
def test_the_burst_that_an_error_advises_is_accepted(p: float) -> None:
    try:
        LINKS["gilbert-elliott"](p=p, burst=1.0)
    except ConfigError as error:
        advised = float(str(error).split("at least ")[1].split(" to reach")[0])
        LINKS["gilbert-elliott"](p=p, burst=advised)
    else:
        assert p >= 0.5


def test_probabilities_gives_one_or_more() -> None:
    assert probabilities("p", 1).tolist() == [1.0]
    assert probabilities("p", (0, 0.5)).tolist() == [0.0, 0.5]
