"""Who is who, over nodes that come and go."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import json

from hypothesis import given
from hypothesis import strategies as st

from safari.errors import SafariError
from safari.flower.roster import Roster

MEETINGS = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from(["0", "1", "4", "x", "y", "007", "12"]), st.integers(0, 5))
)


@given(MEETINGS)
def test_names_keep_their_seats_and_no_two_share_one(meetings):
    roster = Roster(clients=5)
    for node, name, round in meetings:
        before = dict(roster.names)
        try:
            roster = roster.meet(node, name, round)
        except SafariError:
            assert len(before) == 5
            continue
        assert before.items() <= roster.names.items()
        assert len(set(roster.names.values())) == len(roster.names)
        assert all(0 <= seat < 5 for seat in roster.names.values())
        assert roster.seats([node])[node] == roster.names[name]
        # One name, one node.
        assert len(set(roster.nodes.values())) == len(roster.nodes)


@given(MEETINGS, st.sets(st.integers(1, 20), max_size=12))
def test_every_seat_is_given_once(meetings, nodes):
    roster = Roster(clients=5)
    for node, name, round in meetings:
        if name in roster.names or len(roster.names) < 5:
            roster = roster.meet(node, name, round)
    seats = roster.seats(nodes)
    assert len(set(seats.values())) == len(seats)
    assert not set(seats.values()) & set(roster.absent(nodes, 9, None))


@given(MEETINGS)
def test_a_roster_survives_json(meetings):
    roster = Roster(clients=7)
    for node, name, round in meetings:
        roster = roster.meet(node, name, round, weight=float(round + 1))
    assert Roster.from_json(json.loads(json.dumps(roster.to_json()))) == roster


def test_a_number_is_its_own_seat_where_that_is_free():
    roster = Roster(clients=3).meet(1, "2", 0).meet(2, "late", 0).meet(3, "0", 0)
    assert roster.names == {"2": 2, "late": 0, "0": 1}
    with pytest.raises(SafariError, match="client 'four' is one too many: clients is 3"):
        roster.meet(4, "four", 0)


def test_shares_are_as_reported_and_the_mean_where_nothing_was():
    roster = Roster(clients=3).meet(1, "0", 0, weight=10.0).meet(2, "1", 0, weight=30.0).meet(3, "2", 0)
    assert roster.shares() == [10.0, 30.0, 20.0]
    assert Roster(clients=2).shares() == [1.0, 1.0]
