"""Congestion control: a configured or learned rate that gives way to growing delay, and never to loss alone.

Loss says nothing about congestion on a link that loses a third of what it carries anyway. A queue does: the
receiver reports the one-way delay of what it got, and what that is above the least delay seen so far is
time spent in queues. As in LEDBAT (RFC 6817) the rate aims at a small queue: above `target` it is cut,
below half of it the rate grows again, at most once in a round-trip time. A cut goes below the rate
`through` at which our data has been leaving the queue, so that the queue drains; it counts what was lost as
well as what arrived.

    queue > target          rate ← max(rate / 10, min(3/4 · rate, 3/4 · through))
    queue < target / 2      rate ← rate · 5/4     (doubled as long as it was never cut)

A whole upload about which nothing was heard halves the rate that the next one starts with (the circuit
breaker that RFC 8085 asks for, on the scale of rounds).
"""

from __future__ import annotations

from dataclasses import dataclass

from safari.errors import ConfigError
from safari.net.seal import DATAGRAM

# A timer is late by some milliseconds: what it missed is sent in one go.
_BURST_SECONDS = 0.005
_BURST_DATAGRAMS = 4
_GROWTH, _CUT, _DEEPEST_CUT = 1.25, 0.75, 0.1
_LEAST_STEP = 0.02


@dataclass(frozen=True)
class Pacing:
    """Sending rate of one end, and its limits.

    Args:
        rate: Bytes a second, with headers of UDP and above left out; 0: learn it, starting at `start`.
        start: Where learning starts.
        least: The rate is never cut below this.
        most: And never grows above this.
        target: Seconds that datagrams may wait in queues on the way.
    """

    rate: float = 0.0
    start: float = 250_000.0
    least: float = 10_000.0
    most: float = 125_000_000.0
    target: float = 0.05

    def __post_init__(self) -> None:
        problems = [] if self.rate >= 0 else [f"rate must be at least 0, got {self.rate}"]
        problems += [
            f"{name} must be above 0, got {getattr(self, name)}"
            for name in ("start", "least", "most", "target")
            if not getattr(self, name) > 0
        ]
        if not problems and not self.least <= self.most:
            problems.append(f"least must be at most most ({self.most}), got {self.least}")
        if problems:
            raise ConfigError(problems)

    @property
    def ceiling(self) -> float:
        """The highest rate ever: the configured one, or `most` where it is learned."""
        return self.rate or self.most


class Pacer:
    """The sending rate of one session's direction, and when the next datagram may go."""

    def __init__(self, pacing: Pacing, now: float, rate: float | None = None):
        """`rate`: what an earlier session has learned."""
        self.pacing = pacing
        first = pacing.rate or pacing.start if rate is None else rate
        self.rate = min(max(first, pacing.least), pacing.ceiling)
        self._credit_at = now
        self._base: float | None = None
        self._changed_at = -float("inf")
        self._cut = False
        self._heard = False

    def next_at(self) -> float:
        """When the next datagram may be sent."""
        return self._credit_at

    def ready(self, now: float) -> bool:
        """May one be sent now?"""
        return self._credit_at <= now

    def spend(self, now: float, size: int) -> None:
        """Note that a datagram of `size` bytes was sent."""
        # Time in which nothing was sent is worth a short burst at most.
        burst = max(_BURST_SECONDS, _BURST_DATAGRAMS * DATAGRAM / self.rate)
        self._credit_at = max(self._credit_at, now - burst) + size / self.rate

    def on_delay(self, now: float, delay: float, round_trip: float, through: float) -> None:
        """Adapt to a report.

        Args:
            now: The present.
            delay: One way, up to a constant, in seconds.
            round_trip: In seconds.
            through: Bytes a second of ours that left the network, arrived or lost; infinite if unknown.
        """
        self._heard = True
        self._base = delay if self._base is None else min(self._base, delay)
        if now - self._changed_at < max(round_trip, _LEAST_STEP):
            return
        queue, target = delay - self._base, self.pacing.target
        if queue > target:
            rate = max(_DEEPEST_CUT * self.rate, _CUT * min(self.rate, through))
            self._cut = True
        elif queue < target / 2:
            rate = self.rate * (_GROWTH if self._cut else 2.0)
        else:
            return
        self._changed_at = now
        self.rate = min(max(rate, self.pacing.least), self.pacing.ceiling)

    def learned(self) -> float:
        """The rate that the next session should start with."""
        return self.rate if self._heard else max(self.rate / 2, self.pacing.least)
