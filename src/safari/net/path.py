"""A network path in memory: what goes in at one end comes out at the other, late, or not at all.

For tests, benchmarks and trials: two ends are joined by a pair of these, or a relay puts them between
sockets.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from safari.errors import ConfigError


@dataclass(frozen=True)
class Conditions:
    """Loss, delay, rate and duplication of datagrams on a path.

    Args:
        loss: The share that is lost, in the long run.
        burst: How many in a row are lost on average; 1: each is lost independently of the others.
        delay: Seconds on the way.
        jitter: Up to this many seconds more, drawn for each packet, so that packets overtake each other.
        rate: Bytes a second that leave the queue; 0: no queue.
        queue: Bytes that the queue holds; what comes beyond is lost.
        duplicates: The share that arrives twice.
    """

    loss: float = 0.0
    burst: float = 1.0
    delay: float = 0.0
    jitter: float = 0.0
    rate: float = 0.0
    queue: float = 64_000.0
    duplicates: float = 0.0

    def __post_init__(self) -> None:
        problems = [
            f"{name} must lie between 0 and 1, got {getattr(self, name)}"
            for name in ("loss", "duplicates")
            if not 0 <= getattr(self, name) <= 1
        ]
        problems += [
            f"{name} must be at least 0, got {getattr(self, name)}"
            for name in ("delay", "jitter", "rate", "queue")
            if not getattr(self, name) >= 0
        ]
        if not self.burst >= 1:
            problems.append(f"burst must be at least 1, got {self.burst}")
        elif (
            not problems and self.burst > 1 and 0 < self.loss < 1 and self.loss > self.burst * (1 - self.loss)
        ):
            most = self.burst / (1 + self.burst)
            problems.append(f"loss must be at most {most:.3g} in bursts of {self.burst}, got {self.loss}")
        if problems:
            raise ConfigError(problems)


class Path:
    """One direction of a path; the draws depend on `rng` alone, not on the times."""

    def __init__(self, conditions: Conditions, rng: np.random.Generator):
        self.conditions = conditions
        self.offered = self.lost = 0
        self._rng = rng
        self._bad = bool(rng.random() < conditions.loss)
        self._free_at = -float("inf")
        self._heap: list[tuple[float, int, bytes, Any]] = []
        self._tie = count()

    def send(self, data: bytes, now: float, tag: Any = None) -> None:
        """A datagram enters; `tag` comes out with it."""
        c = self.conditions
        self.offered += 1
        loses, late, twice = self._rng.random(3).tolist()
        if self._loses(loses):
            self.lost += 1
            return
        at = now
        if c.rate:
            start = max(now, self._free_at)
            if (start - now) * c.rate > c.queue:
                self.lost += 1
                return
            at = self._free_at = start + len(data) / c.rate
        at += c.delay + c.jitter * late
        for _ in range(1 + (twice < c.duplicates)):
            heapq.heappush(self._heap, (at, next(self._tie), data, tag))

    def due(self, now: float) -> list[tuple[bytes, Any]]:
        """Remove and return the datagrams that have arrived by `now`."""
        out = []
        while self._heap and self._heap[0][0] <= now:
            _, _, data, tag = heapq.heappop(self._heap)
            out.append((data, tag))
        return out

    def next_time(self) -> float | None:
        """When something comes out next; None: never."""
        return self._heap[0][0] if self._heap else None

    def _loses(self, draw: float) -> bool:
        """Independent, or a chain of two states (Gilbert): in the bad one everything is lost."""
        c = self.conditions
        if c.burst == 1 or not 0 < c.loss < 1:
            return draw < c.loss
        leave = 1 / c.burst if self._bad else c.loss / (1 - c.loss) / c.burst
        self._bad ^= draw < leave
        return self._bad
