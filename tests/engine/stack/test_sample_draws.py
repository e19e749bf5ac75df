"""Draws made ahead are the draws that would have been made in time."""

from __future__ import annotations

import threading

import pytest

from engine.kit import SMALL, world_of
from safari.engine.stack.sample_draws import Draws


def wait(draws: Draws[object]) -> None:
    assert draws._thread is not None
    draws._thread.submit(lambda: None).result()


def test_the_thread_draws_the_next_round_and_nothing_twice():
    made: list[tuple[int, int, bool]] = []

    def draw(client: int, t: int) -> int:
        made.append((client, t, threading.current_thread() is threading.main_thread()))
        return 100 * t + client

    draws = Draws(draw, ahead=lambda t: [t, t + 1])
    assert draws([0, 1], 0) == [0, 1]
    wait(draws)
    assert draws([1], 1) == [101]
    wait(draws)
    assert draws([1, 2, 5], 1) == [101, 102, 105]
    assert made == [
        (0, 0, True), (1, 0, True), (1, 1, False), (2, 1, False), (2, 2, False), (3, 2, False), (5, 1, True),
    ]  # fmt: skip


@pytest.mark.parametrize("rounds", [[0, 1, 2], [5, 2, 5, 3], [7, 7, 8, 7]])
def test_rounds_in_any_order(rounds):
    """Arms of a resumed run may stand at different rounds."""
    draws = Draws(lambda client, t: (client, t), ahead=lambda t: range(4))
    for t in rounds:
        assert draws([3, 9], t) == [(3, t), (9, t)]
        wait(draws)
        assert len(draws._made) <= 2, "rounds pile up"


def test_the_same_numbers_as_the_world_gives_on_the_spot():
    world = world_of({**SMALL, "local": {"steps": 2, "batch": 8, "augment": "crop-flip"}})
    draws = Draws(world.training_draw, world.cohort)
    for t in range(3):
        found = draws(world.cohort(t), t)
        wait(draws)
        for client, (index, extra) in zip(world.cohort(t), found, strict=True):
            expected, more = world.training_draw(client, t)
            assert (index == expected).all()
            assert all((a == b).all() for a, b in zip(extra, more, strict=True))
