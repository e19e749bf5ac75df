"""Threads for a CPU: each does a share of the clients, or of the test samples, from end to end.

A small net's kernels are too short to be split between cores: threads that wait for each other after every
kernel gain nothing, and lose much when another process needs a core. Shares that meet once a round do gain.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

S = TypeVar("S")
T = TypeVar("T")


class ThreadPool:
    """Pool of `size` threads, each of which runs torch on a single thread."""

    def __init__(self, size: int):
        self.size = size
        self._pool = ThreadPoolExecutor(size, "safari", initializer=torch.set_num_threads, initargs=(1,))
        self._under_way: set[Future[Any]] = set()

    @property
    def busy(self) -> bool:
        """Is anything under way, or waiting?"""
        return bool(self._under_way)

    def submit(self, work: Callable[[S], T], shares: Sequence[S]) -> list[Future[T]]:
        """Begin `work` for every share; the caller lets torch use one thread until all are done.

        >>> [share.result() for share in ThreadPool(2).submit(sum, [[1, 2], [3]])]
        [3, 3]
        """
        begun = [self._pool.submit(work, share) for share in shares]
        self._under_way.update(begun)
        for share in begun:
            share.add_done_callback(self._under_way.discard)
        return begun

    def drop(self) -> None:
        """Forget what has not begun."""
        for share in list(self._under_way):
            share.cancel()

    def map(self, work: Callable[[S], T], shares: Sequence[S]) -> list[T]:
        """`work` for every share, some at the same time; results in the order of the shares.

        A thread pool that has something else to do goes on with that, and the caller does the work.

        >>> ThreadPool(2).map(sum, [[1, 2], [3]])
        [3, 3]
        """
        if len(shares) == 1 or self.busy:
            return [work(share) for share in shares]
        with threads(1):
            return [share.result() for share in self.submit(work, shares)]

    def split(self, things: Sequence[S], most: int, among: int = 1) -> list[Sequence[S]]:
        """Even shares of at most `most` things, equally many for each thread; the larger ones first. When the
        thread pool is shared `among` several such works, each has its part of the threads.

        >>> ThreadPool(2).split([1, 2, 3, 4, 5], most=16)
        [[1, 2, 3], [4, 5]]
        >>> ThreadPool(2).split([1, 2, 3, 4, 5], most=2)
        [[1, 2], [3], [4], [5]]
        >>> ThreadPool(2).split([1, 2, 3, 4, 5], most=16, among=2)
        [[1, 2, 3, 4, 5]]
        """
        needed, part = -(-len(things) // most), -(-self.size // among)
        shares = max(1, min(len(things), -(-needed // part) * part))
        least, more = divmod(len(things), shares)
        ends = [(i + 1) * least + min(i + 1, more) for i in range(shares)]
        return [things[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch computes with this many threads; its libraries count them for the whole process."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def finished(works: Sequence[Generator[None, None, T]]) -> Iterator[T]:
    """Run all `works` to their end and yield their results in order.

    A generator yields where it would have to wait; all are begun before the first is waited for.
    """
    results: dict[int, T] = {}

    def go_on(which: int) -> None:
        try:
            next(works[which])
        except StopIteration as end:
            results[which] = end.value

    for which in range(len(works)):
        go_on(which)
    for which in range(len(works)):
        while which not in results:
            go_on(which)
        yield results.pop(which)
