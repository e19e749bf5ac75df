"""The lines that a person reads while experiments run, on a clock of their own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from safari.cli.board import Board


@dataclass(frozen=True)
class Piece:
    """What the board reads of a unit."""

    label: str
    rounds: int = 100
    weight: float = 1.0

    @property
    def work(self) -> float:
        return self.rounds * self.weight


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_follows_the_pace_since_the_first_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    """Half a minute of compiling before the first round does not count, and the first seconds are not judged."""
    clock, pieces = Clock(), [Piece("one"), Piece("two")]
    with Board(pieces, clock=clock) as board:
        for worker, piece in enumerate(pieces):
            board.begin(worker, piece)
        clock.now = 30.0
        board.at(0, pieces[0], 1, "round 1")
        clock.now = 34.0
        board.end(1, Piece("nothing"), "")
        clock.now = 50.0
        # 20 rounds in 20 seconds, of 200 less 21.
        board.at(0, pieces[0], 21, "round 21")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split() for line in lines] == [
        ["0/2", "pieces", "0%", "one", "round", "1"],
        ["1/2", "pieces", "0%", "nothing"],
        ["1/2", "pieces", "10%", "3", "min", "left", "one", "round", "21"],
    ]


def test_a_quiet_board_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    clock, piece = Clock(), Piece("one")
    with Board([piece], quiet=True, clock=clock) as board:
        board.begin(0, piece)
        clock.now = 60.0
        board.at(0, piece, 50, "")
        board.end(0, piece, "")
    assert capsys.readouterr().err == ""
