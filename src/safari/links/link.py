"""Links: pairs of pure functions that decide in each round whose messages get through.

A link knows the truth (probabilities, bursts, traces) and the server does not: it sees only
who arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from safari.errors import ConfigError, brief

State = dict[str, np.ndarray]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Setting:
    """Inputs of a link: the number of clients, the labels they hold, and a random generator of its own."""

    clients: int
    label_counts: NDArray[np.int64]
    rng: np.random.Generator


@dataclass(frozen=True)
class Link:
    """`init(setting) -> state`; `apply(state, round, rng) -> (delivered, state)`.

    `delivered` holds a bool a client. `rng` is fresh every round; draw as many numbers for each client, in
    order, so that adding a client does not change what the others draw. `rounds(state)`, for a link that ends,
    says how many rounds it has: a longer run is refused before it begins. `period`: after how many rounds a link that
    repeats itself starts over; a run whose tests leave out most of it gets a note.
    """

    init: Callable[[Setting], State]
    apply: Callable[[State, int, np.random.Generator], tuple[Bools, State]]
    rounds: Callable[[State], int] | None = None
    period: int | None = None

    def __post_init__(self) -> None:
        """ConfigError for a period that is no number of rounds."""
        period: object = self.period
        if period is None:
            return
        if isinstance(period, bool) or not isinstance(period, int | np.integer) or period < 1:
            raise ConfigError(f"period must be a whole number of rounds, at least 1, got {brief(period)}")
        object.__setattr__(self, "period", int(period))


def check_length(field: str, link: Link, state: State, rounds: int) -> None:
    """ConfigError when a run is longer than what a link has to say.

    >>> short = Link(lambda setting: {}, lambda state, t, rng: (np.ones(1, bool), state), lambda state: 3)
    >>> check_length("uplink", short, {}, 5)
    Traceback (most recent call last):
    ...
    safari.errors.ConfigError: rounds must be at most the 3 that uplink has, got 5
    """
    if link.rounds is not None and link.rounds(state) < rounds:
        raise ConfigError(f"rounds must be at most the {link.rounds(state)} that {field} has, got {rounds}")


def from_probability(
    init: Callable[[Setting], Floats],
    schedule: Callable[[Floats, int], Floats] | None = None,
    *,
    period: int | None = None,
) -> Link:
    """A link with a success probability for each client, perhaps changed over time by `schedule(p, round)`, which may
    repeat itself after `period` rounds.

    >>> link = from_probability(lambda setting: np.array([1.0, 0.0]), lambda p, t: p if t < 5 else 1 - p)
    >>> rng = np.random.default_rng(0)
    >>> state = link.init(Setting(2, np.zeros((2, 1), int), rng))
    >>> [link.apply(state, t, rng)[0].tolist() for t in (0, 5)]
    [[True, False], [False, True]]
    """

    def start(setting: Setting) -> State:
        p = np.asarray(init(setting), dtype=np.float64)
        if p.shape != (setting.clients,):
            raise ConfigError(
                f"there must be a probability for each of the {setting.clients} clients, "
                f"got shape {[*p.shape]}"
            )
        _check_range(p, "at the start")
        return {"p": p}

    def apply(state: State, t: int, rng: np.random.Generator) -> tuple[Bools, State]:
        base = state["p"]
        if schedule is None:
            return rng.random(len(base)) < base, state
        p = np.asarray(schedule(base, t), dtype=np.float64)
        if p.shape != base.shape:
            raise ConfigError(
                f"there must be a probability for each of the {len(base)} clients, "
                f"got shape {[*p.shape]} in round {t}"
            )
        _check_range(p, f"in round {t}")
        return rng.random(len(p)) < p, state

    return Link(start, apply, period=period)


def _check_range(p: Floats, when: str) -> None:
    # A product of probabilities may be a rounding above 1; NaN fails this too.
    wrong = np.flatnonzero(~((p >= -_ROUNDING) & (p <= 1 + _ROUNDING)))
    if len(wrong):
        client = wrong[0]
        raise ConfigError(
            f"the probability of client {client} must lie between 0 and 1, got {p[client]} {when}"
        )


def spread(field: str, p: float | Sequence[float], clients: int) -> Floats:
    """A probability a client, from one number or from a list that is repeated to fit.

    >>> spread("p", [1, 0.3], 4).tolist()
    [1.0, 0.3, 1.0, 0.3]
    """
    values = probabilities(field, p)
    if clients % len(values):
        raise ConfigError(
            f"{field} must hold one number or a list whose length divides the {clients} clients; "
            f"got {len(values)} numbers"
        )
    return np.tile(values, clients // len(values))


def probabilities(field: str, p: float | Sequence[float]) -> Floats:
    """One or more numbers, each checked to lie between 0 and 1."""
    values = np.atleast_1d(np.asarray(p, dtype=np.float64))
    if values.size == 0:
        raise ConfigError(f"{field} must hold at least one number, got an empty list")
    for value in values:
        if not 0 <= value <= 1:
            raise ConfigError(f"{field} must lie between 0 and 1, got {value}")
    return values
