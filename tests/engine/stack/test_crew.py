"""Threads that share a round's work: the split, the order of results, and torch's threads afterwards."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from safari.engine.stack.crew import Crew, threads


@given(size=st.integers(1, 5), count=st.integers(1, 40), most=st.integers(1, 12))
def test_shares_are_even_and_complete(size, count, most):
    shares = Crew(size).split(list(range(count)), most)
    assert [thing for share in shares for thing in share] == list(range(count))
    lengths = [len(share) for share in shares]
    assert max(lengths) <= most
    assert max(lengths) - min(lengths) <= 1
    assert len(shares) % size == 0 or max(lengths) == 1


def test_results_come_in_order_from_threads_of_one_thread_each():
    meet = threading.Barrier(2, timeout=10)

    def work(share: int) -> tuple[int, str, int]:
        meet.wait()  # neither gets on alone: they run at the same time
        return share, threading.current_thread().name, torch.get_num_threads()

    with threads(2):
        (one, first, inside), (two, second, _) = Crew(2).map(work, [1, 2])
        assert (one, two, inside) == (1, 2, 1)
        assert first != second
        assert torch.get_num_threads() == 2


def test_a_single_share_stays_where_it_is():
    here = threading.current_thread()
    with threads(2):
        assert Crew(3).map(lambda _: (threading.current_thread(), torch.get_num_threads()), [0]) == [
            (here, 2)
        ]


def test_an_error_comes_out_and_leaves_the_threads_as_they_were():
    def work(share: int) -> None:
        raise ValueError(f"share {share}")

    with threads(2):
        with pytest.raises(ValueError, match="share 0"):
            Crew(2).map(work, [0, 1])
        assert torch.get_num_threads() == 2
