"""Threads for a CPU: each does a share of the clients, or of the test samples, from end to end.

A small net's kernels are too short to be split between cores: threads that wait for each other after every
kernel gain nothing, and lose much when somebody else needs a core. Shares that meet once a round do gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

S = TypeVar("S")
T = TypeVar("T")


class Crew:
    """As many threads as torch has been given, each of which lets torch use no more than one."""

    def __init__(self, size: int):
        self.size = size
        self._pool = ThreadPoolExecutor(size, "safari", initializer=torch.set_num_threads, initargs=(1,))

    def map(self, work: Callable[[S], T], shares: Sequence[S]) -> list[T]:
        """`work` for every share, some at the same time; results in the order of the shares.

        >>> Crew(2).map(sum, [[1, 2], [3]])
        [3, 3]
        """
        if len(shares) == 1:
            return [work(shares[0])]
        with threads(1):
            return list(self._pool.map(work, shares))

    def split(self, things: Sequence[S], most: int) -> list[Sequence[S]]:
        """Even shares of at most so many things, as many for each thread; the larger ones first.

        >>> Crew(2).split([1, 2, 3, 4, 5], most=16)
        [[1, 2, 3], [4, 5]]
        >>> Crew(2).split([1, 2, 3, 4, 5], most=2)
        [[1, 2], [3], [4], [5]]
        """
        needed = -(-len(things) // most)
        shares = max(1, min(len(things), -(-needed // self.size) * self.size))
        least, more = divmod(len(things), shares)
        ends = [(i + 1) * least + min(i + 1, more) for i in range(shares)]
        return [things[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch computes with so many threads; its libraries count them for the whole process."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
