"""Clients' draws, made once for all arms, and ahead of time while the device is busy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


class Draws(Generic[T]):
    """`draw(client, t)`, remembered for the rounds under way.

    A draw is a function of the run's seed, the client and the round: arms that stand at the same round share
    it, and it does not matter who makes it or when. With `ahead`, which names the clients of a round, those
    of the next are drawn by a thread of their own.

    >>> drawn = []
    >>> draws = Draws(lambda client, t: drawn.append((client, t)) or 10 * t + client)
    >>> draws([1, 2], 0), draws([2, 3], 0), draws([1], 1)
    ([1, 2], [2, 3], [11])
    >>> drawn
    [(1, 0), (2, 0), (3, 0), (1, 1)]
    """

    def __init__(self, draw: Callable[[int, int], T], ahead: Callable[[int], Sequence[int]] | None = None):
        self._draw, self._ahead = draw, ahead
        self._made: dict[int, dict[int, T]] = {}
        self._thread = ThreadPoolExecutor(1, "safari-draws") if ahead is not None else None

    def __call__(self, clients: Sequence[int], t: int) -> list[T]:
        """The draws of these clients in round t."""
        made = self._made.get(t)
        if made is None:
            made = {}
            self._made = {t: made}
        found = [self._one(made, client, t) for client in clients]
        if self._thread is not None and self._ahead is not None and t + 1 not in self._made:
            # Only this round and the next are kept.
            self._made = {t: made, t + 1: {}}
            self._thread.submit(self._fill, self._ahead, self._made[t + 1], t + 1)
        return found

    def _one(self, made: dict[int, T], client: int, t: int) -> T:
        if client not in made:
            made[client] = self._draw(client, t)
        return made[client]

    def _fill(self, clients: Callable[[int], Sequence[int]], made: dict[int, T], t: int) -> None:
        for client in clients(t):
            if client not in made:
                made[client] = self._draw(client, t)


def step_by_step(
    draws: Sequence[tuple[np.ndarray, tuple[np.ndarray, ...]]],
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Clients' draws as `[steps, clients · batch, ...]`: what each step needs lies together."""
    index = np.stack([index for index, _ in draws], axis=1)
    steps, clients, batch = index.shape
    extra = []
    for column in zip(*(rest for _, rest in draws), strict=True):
        whole = np.stack([d.reshape(steps, batch, *d.shape[1:]) for d in column], axis=1)
        extra.append(whole.reshape(steps, clients * batch, *whole.shape[3:]))
    return index.reshape(steps, clients * batch), extra
