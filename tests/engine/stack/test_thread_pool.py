"""Threads that share a round's work: the split, the order of results, and torch's threads afterwards."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from safari.engine.stack.thread_pool import ThreadPool, threads


@given(size=st.integers(1, 5), count=st.integers(1, 40), most=st.integers(1, 12))
def test_shares_are_even_and_complete(size, count, most):
    shares = ThreadPool(size).split(list(range(count)), most)
    assert [thing for share in shares for thing in share] == list(range(count))
    lengths = [len(share) for share in shares]
    assert max(lengths) <= most
    assert max(lengths) - min(lengths) <= 1
    assert len(shares) % size == 0 or max(lengths) == 1


@given(size=st.integers(1, 5), count=st.integers(1, 40), most=st.integers(1, 12), among=st.integers(1, 6))
def test_several_works_have_their_part_of_the_crew(size, count, most, among):
    shares = ThreadPool(size).split(list(range(count)), most, among)
    assert shares == ThreadPool(-(-size // among)).split(list(range(count)), most)


def test_what_has_not_begun_can_be_dropped_and_the_caller_helps_himself_meanwhile():
    pool, begun, go = ThreadPool(1), threading.Event(), threading.Event()

    def work(share: int) -> int:
        begun.set()
        go.wait(10)
        return share

    first, second = pool.submit(work, [1, 2])
    assert begun.wait(10)
    assert pool.busy
    here = threading.current_thread()
    assert pool.map(lambda share: (share, threading.current_thread()), [3, 4]) == [(3, here), (4, here)]
    pool.drop()
    go.set()
    assert first.result(10) == 1
    assert second.cancelled()
    assert pool.map(lambda share: share, [5, 6]) == [5, 6]
    assert not pool.busy


def test_results_come_in_order_from_threads_of_one_thread_each():
    meet = threading.Barrier(2, timeout=10)

    def work(share: int) -> tuple[int, str, int]:
        meet.wait()  # neither gets on alone: they run at the same time
        return share, threading.current_thread().name, torch.get_num_threads()

    with threads(2):
        (one, first, inside), (two, second, _) = ThreadPool(2).map(work, [1, 2])
        assert (one, two, inside) == (1, 2, 1)
        assert first != second
        assert torch.get_num_threads() == 2


def test_a_single_share_stays_where_it_is():
    here = threading.current_thread()
    with threads(2):
        assert ThreadPool(3).map(lambda _: (threading.current_thread(), torch.get_num_threads()), [0]) == [
            (here, 2)
        ]


def test_an_error_comes_out_and_leaves_the_threads_as_they_were():
    def work(share: int) -> None:
        raise ValueError(f"share {share}")

    with threads(2):
        with pytest.raises(ValueError, match="share 0"):
            ThreadPool(2).map(work, [0, 1])
        assert torch.get_num_threads() == 2
