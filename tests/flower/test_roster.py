"""Who is who, over nodes that come and go, and what a node cannot have."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")

import json

from hypothesis import given
from hypothesis import strategies as st

from safari.errors import SafariError
from safari.flower.roster import MOST_NAMES, Roster

CLIENTS = 5
NAMES = st.sampled_from(["0", "1", "4", "x", "y", "007", "12", "node-3"])
ONLINE = st.sets(st.integers(1, 9), max_size=9)
MEETINGS = st.lists(st.tuples(st.integers(1, 9), NAMES, ONLINE), max_size=40)
PATIENCE = st.sampled_from([None, 0, 3])


def history(meetings, patience) -> list[Roster]:
    """The rosters as the meetings go by, one a round; who is turned away changes nothing."""
    rosters = [Roster(clients=CLIENTS)]
    for round, (node, name, online) in enumerate(meetings):
        try:
            found = rosters[-1].admit(node, name, round, online={*online, node}, patience=patience)
        except SafariError:
            found = rosters[-1]
        rosters.append(found)
    return rosters


@given(MEETINGS, PATIENCE)
def test_no_two_share_a_seat_and_no_node_has_two(meetings, patience):
    for roster in history(meetings, patience):
        assert len(set(roster.names.values())) == len(roster.names) <= CLIENTS
        assert all(0 <= seat < CLIENTS for seat in roster.names.values())
        assert len(set(roster.nodes.values())) == len(roster.nodes)
        assert set(roster.nodes.values()) <= set(roster.names) == set(roster.heard)
        assert all(count <= MOST_NAMES for count in roster.taken.values())


@given(MEETINGS, PATIENCE)
def test_a_connected_nodes_name_is_its_own(meetings, patience):
    rosters = history(meetings, patience)
    for before, now, (node, _, online) in zip(rosters, rosters[1:], meetings, strict=False):
        for other in online - {node}:
            assert now.nodes.get(other) == before.nodes.get(other)


@given(MEETINGS)
def test_without_patience_no_name_loses_its_seat_to_another_node(meetings):
    rosters = history(meetings, None)
    for before, now, (node, _, _) in zip(rosters, rosters[1:], meetings, strict=False):
        gone = {name for name, seat in before.names.items() if now.names.get(name) != seat}
        assert gone <= {before.nodes.get(node)}


@given(MEETINGS, PATIENCE, st.sets(st.integers(1, 20), max_size=12))
def test_every_seat_is_given_once(meetings, patience, nodes):
    roster = history(meetings, patience)[-1]
    absent = roster.absent(nodes, 99, None)
    seats = roster.seats(nodes)
    assert len(set(seats.values())) == len(seats)
    assert not set(seats.values()) & set(absent)
    with_spare = roster.seats(nodes, absent)
    assert len(set(with_spare.values())) == len(with_spare) == min(len(nodes), CLIENTS)


@given(MEETINGS, PATIENCE)
def test_a_roster_survives_json(meetings, patience):
    roster = history(meetings, patience)[-1]
    assert Roster.from_json(json.loads(json.dumps(roster.to_json()))) == roster


def test_a_number_is_its_own_seat_where_that_is_free():
    roster = Roster(clients=3).admit(1, "2", 0).admit(2, "late", 0).admit(3, "0", 0)
    assert roster.names == {"2": 2, "late": 0, "0": 1}
    with pytest.raises(SafariError, match="client 'four' is one too many: clients is 3; raise it, or set"):
        roster.admit(4, "four", 0)


def test_shares_are_as_reported_and_the_mean_where_nothing_was():
    roster = Roster(clients=3).admit(1, "0", 0, weight=10.0).admit(2, "1", 0, weight=30.0).admit(3, "2", 0)
    assert roster.shares() == [10.0, 30.0, 20.0]
    assert Roster(clients=2).shares() == [1.0, 1.0]


def refused(roster: Roster, *claim, **options) -> str:
    with pytest.raises(SafariError) as told:
        roster.admit(*claim, **options)
    return str(told.value)


def test_who_may_take_a_name():
    roster = Roster(clients=3).admit(1, "a", 0).admit(2, "b", 0)
    # Another node cannot while the owner is connected, known or not.
    assert refused(roster, 9, "a", 5, online={1, 9}) == "client 'a' is node 1, which is connected"
    assert refused(roster, 2, "a", 5, online={1, 2}) == "client 'a' is node 1; this node is client 'b'"
    # A known one not even when it is gone, as long as it may come back.
    assert refused(roster, 2, "a", 5, online={2}) == "client 'a' is node 1; this node is client 'b'"
    assert refused(roster, 2, "a", 5, patience=5) == "client 'a' is node 1; this node is client 'b'"
    assert roster.admit(2, "a", 6, online={2}, patience=5).nodes == {2: "a"}
    # An unknown one is the client that came back.
    assert roster.admit(9, "a", 5, online={2, 9}).nodes == {2: "b", 9: "a"}
    # Names that nodes have by themselves are theirs.
    assert refused(roster, 9, "node-2", 5, online={2, 9}) == "client 'node-2': that is another node's name"
    assert roster.admit(9, "node-9", 5, online={2, 9}).names["node-9"] == 2


def test_a_node_with_many_names_has_one_seat_and_soon_no_more_names():
    roster = Roster(clients=4).admit(1, "a", 0).admit(2, "b", 0)
    for name in ("c", "d"):
        roster = roster.admit(2, name, 1, online={1, 2})
    assert roster.names == {"a": 0, "d": 1}
    assert refused(roster, 2, "e", 2, online={1, 2}) == "client 'e': the node has had 3 names and stays 'd'"
    assert roster.admit(2, "d", 2, online={1, 2}).heard["d"] == 2


def test_silent_clients_make_room_after_patience():
    roster = Roster(clients=2).admit(1, "a", 0).admit(2, "b", 3)
    assert "one too many" in refused(roster, 9, "new", 5, patience=5)
    # The one that is silent for longer goes first.
    assert roster.admit(9, "new", 9, patience=2).names == {"b": 1, "new": 0}
    # A node that is connected keeps its seat, however silent.
    assert roster.admit(9, "new", 9, patience=2, online={1, 9}).names == {"a": 0, "new": 1}
    assert "one too many" in refused(roster, 9, "new", 9, patience=2, online={1, 2, 9})
    assert roster.expired([], 5, 2) == [0]
    assert roster.absent([], 5, 2) == [1]


def test_which_packets_came_is_kept_until_the_client_is_heard_again():
    roster = Roster(clients=2).admit(7, "a", 0, came=b"\xa0").admit(8, "b", 0)
    again = Roster.from_json(json.loads(json.dumps(roster.to_json())))
    assert again.came == {"a": b"\xa0"}
    assert again.admit(7, "a", 1).came == {}
