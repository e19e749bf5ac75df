"""The links that come with the package: each function's keyword arguments are its options."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from safari.bounds import at_least
from safari.errors import ConfigError, brief
from safari.links.link import Bools, Floats, Link, Setting, State, from_probability, probabilities, spread


def perfect() -> Link:
    """Everything arrives."""
    return from_probability(lambda setting: np.ones(setting.clients))


def lost() -> Link:
    """Nothing ever arrives."""
    return from_probability(lambda setting: np.zeros(setting.clients))


def bernoulli(*, p: float | Sequence[float] = 0.3) -> Link:
    """Each message arrives with the client's own probability p (a number, or a list that is repeated)."""
    probabilities("p", p)
    return from_probability(lambda setting: spread("p", p, setting.clients))


def staircase(
    *, p: float | Sequence[float] = 0.9, levels: Sequence[float] = (1.0, 0.4), every: int = 50
) -> Link:
    """p times a factor that steps through `levels`, `every` rounds each, over and over."""
    probabilities("p", p)
    steps = probabilities("levels", levels)
    at_least("every", every, 1)
    return from_probability(
        lambda setting: spread("p", p, setting.clients),
        lambda base, t: base * steps[t // every % len(steps)],
        period=every * len(steps) if len(set(steps)) > 1 else None,
    )


def sine(*, p: float | Sequence[float] = 0.6, depth: float = 0.6, period: int = 100) -> Link:
    """p times a sine wave between 1 and 1 - 2·depth (never below 0), the same for all clients."""
    probabilities("p", p)
    probabilities("depth", depth)
    at_least("period", period, 2)
    return from_probability(
        lambda setting: spread("p", p, setting.clients),
        lambda base, t: base * _wave(t / period, depth),
        period=period,
    )


def interleaved(
    *, p: float | Sequence[float] = 0.6, depth: float = 0.6, period: int = 100, cutoff: float = 0.1
) -> Link:
    """Sine waves shifted from client to client; below `cutoff` a client falls silent, so they take turns."""
    probabilities("p", p)
    probabilities("depth", depth)
    probabilities("cutoff", cutoff)
    at_least("period", period, 2)

    def schedule(base: Floats, t: int) -> Floats:
        shift = np.arange(len(base)) / len(base)
        now = base * _wave(t / period + shift, depth)
        return np.where(now < cutoff, 0.0, now)

    return from_probability(lambda setting: spread("p", p, setting.clients), schedule, period=period)


def labels(*, low: float = 0.1, high: float = 0.9, p: Sequence[float] = ()) -> Link:
    """A probability a class (`p`, or drawn between low and high); a client has the mean over its labels."""
    probabilities("low", low)
    probabilities("high", high)
    if high < low:
        raise ConfigError(f"high must be at least low ({low}), got {high}")
    if len(p):
        probabilities("p", p)

    def init(setting: Setting) -> Floats:
        classes = setting.label_counts.shape[1]
        if len(p) not in (0, classes):
            raise ConfigError(f"p must hold a number for each of the {classes} classes, got {len(p)} numbers")
        per_class = np.asarray(p) if len(p) else setting.rng.uniform(low, high, classes)
        counts = setting.label_counts.astype(np.float64)
        return np.asarray(counts @ per_class / np.maximum(counts.sum(1), 1), dtype=np.float64)

    return from_probability(init)


def gilbert_elliott(
    *, p: float | Sequence[float] = 0.3, burst: float = 5.0, good: float = 1.0, bad: float = 0.0
) -> Link:
    """Bursts: success `good` in good spells and `bad` in bad ones, which last `burst` rounds on average.

    `p` is the success probability in the long run, a number or a list that is repeated.
    """
    probabilities("p", p)
    probabilities("good", good)
    probabilities("bad", bad)
    if good <= bad:
        raise ConfigError(f"good must be above bad ({bad}), got {good}")
    at_least("burst", burst, 1)
    for value in probabilities("p", p):
        share = _share_good(value, good, bad)
        if not 0 <= share <= 1:
            raise ConfigError(f"p must lie between bad ({bad}) and good ({good}), got {value}")
        if 0 < share < 1 and (1 - share) / (share * burst) > 1:
            # Rounded up, so that the number in the message is one that works.
            needed = math.ceil((1 - share) / share * 100) / 100
            raise ConfigError(f"burst must be at least {needed} to reach p = {value}, got {burst}")

    def init(setting: Setting) -> State:
        share = _share_good(spread("p", p, setting.clients), good, bad)
        return {"share": share, "up": setting.rng.random(setting.clients) < share}

    def apply(state: State, t: int, rng: np.random.Generator) -> tuple[Bools, State]:
        share, up = state["share"], state["up"]
        draws = rng.random((len(share), 2))
        leave_bad = np.where(share >= 1, 1.0, np.where(share <= 0, 0.0, 1 / burst))
        leave_good = np.where(share <= 0, 1.0, (1 - share) / np.maximum(share, 1e-300) / burst)
        up = np.where(up, draws[:, 0] >= leave_good, draws[:, 0] < leave_bad)
        return draws[:, 1] < np.where(up, good, bad), {"share": share, "up": up}

    return Link(init, apply)


def silence(
    *,
    p: float | Sequence[float] = 0.3,
    who: Sequence[int] = (0, 1, 2, 3, 4),
    start: int = 50,
    stop: int = 100,
    every: int = 0,
) -> Link:
    """Bernoulli links, but silent for the clients `who` (ids from 0) in rounds start to stop - 1.

    With `every`, the silence repeats with that period, in rounds.
    """
    probabilities("p", p)
    at_least("start", start, 0)
    if stop <= start:
        raise ConfigError(f"stop must be above start ({brief(start)}), got {brief(stop)}")
    if every and every < stop:
        raise ConfigError(f"every must be 0 or at least stop ({brief(stop)}), got {brief(every)}")
    if len(who) == 0:
        raise ConfigError("who must name at least one client, got an empty list")

    def init(setting: Setting) -> Floats:
        for client in who:
            if not 0 <= client < setting.clients:
                raise ConfigError(f"who must hold ids from 0 to {setting.clients - 1}, got {client}")
        return spread("p", p, setting.clients)

    def schedule(base: Floats, t: int) -> Floats:
        if not start <= (t % every if every else t) < stop:
            return base
        now = base.copy()
        now[list(who)] = 0.0
        return now

    return from_probability(init, schedule, period=every or None)


def come_and_go(*, p: float | Sequence[float] = 0.6, stay: float = 50.0, away: float = 50.0) -> Link:
    """Clients that are there for `stay` rounds on average and then gone for `away`, each in its own time.

    While one is there, its messages arrive with probability p (a number, or a list that is repeated).
    """
    probabilities("p", p)
    for field, value in (("stay", stay), ("away", away)):
        at_least(field, value, 1)

    def init(setting: Setting) -> State:
        here = setting.rng.random(setting.clients) < stay / (stay + away)
        return {"p": spread("p", p, setting.clients), "here": here}

    def apply(state: State, t: int, rng: np.random.Generator) -> tuple[Bools, State]:
        draws = rng.random((len(state["p"]), 2))
        here = np.where(state["here"], draws[:, 0] >= 1 / stay, draws[:, 0] < 1 / away)
        return here & (draws[:, 1] < state["p"]), {"p": state["p"], "here": here}

    return Link(init, apply)


def _wave(phase: float | Floats, depth: float) -> Floats:
    return np.maximum(0.0, 1 - depth + depth * np.sin(2 * np.pi * np.asarray(phase)))


def _share_good(p: Floats | float, good: float, bad: float) -> Floats:
    return np.asarray((np.asarray(p) - bad) / (good - bad), dtype=np.float64)
