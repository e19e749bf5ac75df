"""A round ends at its time: with a clock of our own."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import itertools

from flwr.app import Message, RecordDict

from flower.kit import Loopback
from safari.flower.exchange import exchange, wait_for_nodes


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert 0 <= seconds < 1
        # Even a sleep of nothing takes a moment.
        self.now += seconds or 1e-6


class Slow(Loopback):
    """Node i answers after as many seconds as `delays[i]` says."""

    def __init__(self, clock: Clock, delays: dict[int, float]):
        super().__init__({node: lambda m, c: Message(RecordDict(), reply_to=m) for node in delays})
        self.clock, self.delays, self.due = clock, delays, {}
        self.looks = itertools.count()

    def push_messages(self, messages):
        ids = super().push_messages(messages)
        for message in self.sent:
            self.due[message.metadata.message_id] = self.clock() + self.delays[message.metadata.dst_node_id]
        return ids

    def pull_messages(self, message_ids):
        next(self.looks)
        return super().pull_messages([i for i in message_ids if self.due[i] <= self.clock()])


def ask(delays: dict[int, float], timeout: float) -> tuple[list[int], float, int]:
    clock = Clock()
    grid = Slow(clock, delays)
    messages = [Message(RecordDict(), node, "train") for node in delays]
    replies = exchange(grid, messages, timeout, clock=clock, sleep=clock.sleep)
    sent = {m.metadata.message_id: m.metadata.dst_node_id for m in messages}
    who = sorted(sent[r.metadata.reply_to_message_id] for r in replies)
    return who, clock.now - 100, next(grid.looks)


def test_a_round_ends_when_all_have_answered():
    who, took, _ = ask({1: 0.0, 2: 0.3, 3: 1.0}, timeout=60)
    assert who == [1, 2, 3]
    assert took < 1.6


def test_a_round_ends_at_its_time_and_takes_what_came_until_then():
    who, took, looks = ask({1: 0.2, 2: 9.999, 3: 10.5}, timeout=10)
    assert who == [1, 2]
    assert took == pytest.approx(10, abs=1e-3)
    # Two are still waited for after the first look.
    assert looks < 2 * 35


def test_without_messages_there_is_nothing_to_wait_for():
    assert exchange(None, [], 10) == []


def test_waiting_for_nodes_has_an_end():
    clock = Clock()
    grid = Loopback({1: None, 2: None})
    assert wait_for_nodes(grid, 2, 60, clock=clock, sleep=clock.sleep) == [1, 2]
    assert clock.now == 100
    assert wait_for_nodes(grid, 3, 60, clock=clock, sleep=clock.sleep) == [1, 2]
    assert clock.now == pytest.approx(160)


def test_with_many_nodes_looks_take_at_most_half_of_the_time():
    clock = Clock()

    class Heavy(Slow):
        def pull_messages(self, message_ids):
            clock.now += 0.01
            return super().pull_messages(message_ids)

    grid = Heavy(clock, dict.fromkeys(range(1, 201), 60.0))
    messages = [Message(RecordDict(), node, "train") for node in grid.delays]

    def sleep(seconds):
        clock.now += seconds

    exchange(grid, messages, 40, clock=clock, sleep=sleep)
    # 40 seconds, half of them looks of 0.01 s, and a last look at all 200.
    assert next(grid.looks) <= 40 / 2 / 0.01 + 2 * 200


def test_messages_that_the_superlink_does_not_take_are_reported():
    clock = Clock()
    grid = Slow(clock, {1: 0.0, 2: 0.0})
    push = grid.push_messages
    grid.push_messages = lambda messages: [i if n else None for n, i in enumerate(push(messages))]
    messages = [Message(RecordDict(), node, "train") for node in (1, 2)]
    replies = exchange(grid, messages, 10, clock=clock, sleep=clock.sleep)
    assert [r.has_error() and r.error.reason for r in replies] == [
        "the SuperLink did not take the message",
        False,
    ]


def test_a_broken_way_to_the_superlink_ends_the_round():
    """No client's fault, and nothing that the next round could mend."""

    class Broken(Loopback):
        def pull_messages(self, message_ids):
            raise ConnectionError("connection refused")

    grid = Broken({1: None})
    with pytest.raises(ConnectionError):
        exchange(grid, [Message(RecordDict(), 1, "train")], 1)
