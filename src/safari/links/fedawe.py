"""Availability tied to labels and changing with time: the links of FedAWE's experiments.

Xiang, Ioannidis, Yeh, Joe-Wong, Su: "Efficient Federated Learning against Heterogeneous and Non-stationary
Client Unavailability" (NeurIPS 2024). Each class c has a probability u_c, uniform on [0, halves[0]] in the
first half of the classes and on [0, halves[1]] in the second; client i holds a share ν_ic of class c and is
available with

    p_i^t = f(t) · Σ_c ν_ic u_c

stationary   f(t) = 1
staircase    f(t) = 1 and `low` in turn, for `period` / 2 rounds each
sine         f(t) = 1 − depth + depth · sin(2πt / period)
interleaved  as sine, but a client below `cutoff` is not available at all, so that clients come and go
             one by one

What the paper calls interleaved is read from its public code: the waves are not shifted from client to
client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from safari.errors import ConfigError
from safari.links.link import Floats, Link, Setting, from_probability, probabilities

Dynamics = Literal["stationary", "staircase", "sine", "interleaved"]


def fedawe(
    *,
    dynamics: Dynamics = "sine",
    period: int = 20,
    depth: float = 0.3,
    low: float = 0.4,
    cutoff: float = 0.1,
    halves: Sequence[float] = (1.0, 0.5),
) -> Link:
    """FedAWE's links (2024): availability follows the labels that a client holds, and changes with time.

    `dynamics` is one of stationary, staircase (full, then times `low`, half a `period` each), sine (between
    1 and 1 - 2·depth) and interleaved (sine, and silent below `cutoff`); `halves` are the upper ends of the
    classes' probabilities in the first and second half of the classes.
    """
    probabilities("depth", depth)
    probabilities("low", low)
    probabilities("cutoff", cutoff)
    ends = probabilities("halves", halves)
    if len(ends) != 2:
        raise ConfigError(f"halves must hold two numbers, got {len(ends)}")
    if period < 2 or period % 2:
        raise ConfigError(f"period must be an even number of at least 2 rounds, got {period}")

    def init(setting: Setting) -> Floats:
        classes = setting.label_counts.shape[1]
        upper = np.where(np.arange(classes) < classes // 2, *ends)
        per_class = setting.rng.uniform(0.0, upper)
        counts = setting.label_counts.astype(np.float64)
        return np.asarray(counts @ per_class / np.maximum(counts.sum(1), 1), dtype=np.float64)

    def schedule(base: Floats, t: int) -> Floats:
        if dynamics == "stationary":
            return base
        if dynamics == "staircase":
            return base * (low if t // (period // 2) % 2 else 1.0)
        now = base * max(0.0, 1 - depth + depth * np.sin(2 * np.pi * t / period))
        return np.where(now < cutoff, 0.0, now) if dynamics == "interleaved" else now

    return from_probability(init, schedule, period=None if dynamics == "stationary" else period)
