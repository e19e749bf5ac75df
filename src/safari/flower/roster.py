"""The clients of a run: names that persist while nodes come and go, each with a seat in the aggregation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from safari.errors import SafariError
from safari.flower.protocol import node_name

# A node that is given another name is a device that was set up anew. That does not happen more often than this.
MOST_NAMES = 3


@dataclass(frozen=True)
class Roster:
    """The clients of a run by name.

    A name has a seat from 0 to `clients` - 1, its row in the rule's state; a node has a name. A name that is
    a number gets the seat of that number where it is free, so that partition 3 is client 3; any other gets
    the lowest free one.

    >>> roster = Roster(clients=3).admit(node=77, name="2", round=0).admit(node=55, name="berlin", round=0)
    >>> roster.seats([55, 77, 99])     # 99 has not answered yet: the lowest free seat, for the time being
    {55: 0, 77: 2, 99: 1}
    >>> roster.admit(node=88, name="berlin", round=5).seats([88, 55])    # berlin came back as another node
    {55: 1, 88: 0}

    `names`: the seat of each name. `nodes`: the name of each node that has answered. `heard`: the round in
    which each name was last heard. `weights`: the sample count that each name last stated. `taken`: how many
    names a node has had, where more than one. `came`: a bit for each packet of the upload that was last heard,
    where not all of them arrived.
    """

    clients: int
    names: Mapping[str, int] = field(default_factory=dict)
    nodes: Mapping[int, str] = field(default_factory=dict)
    heard: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    taken: Mapping[int, int] = field(default_factory=dict)
    came: Mapping[str, bytes] = field(default_factory=dict)

    def admit(
        self,
        node: int,
        name: str,
        round: int,
        *,
        online: Collection[int] = (),
        patience: int | None = None,
        weight: float | None = None,
        came: bytes = b"",
    ) -> Roster:
        """The roster after a node has answered under a name; SafariError says why it cannot have that name.

        A name belongs to the node that it was last heard from while that node is among those `online`. When
        it is gone, an unknown node may take the name: the client came back with a new id. A node that has a
        name of its own may not, unless the name was silent for more than `patience` rounds (None: never).

        A known node with a new name keeps its seat: a node never holds two. It may do so twice.

        A newcomer gets a free seat or, where there is none, that of the client that was silent for longest,
        if that is more than `patience` rounds and its node is not `online`.
        """
        self._check_claim(node, name, round, online, patience)
        before = self.nodes.get(node)
        known = self
        if before not in (None, name):
            known = replace(self, taken={**self.taken, node: self.taken.get(node, 1) + 1})
        if name not in known.names:
            if before is not None:
                seat, known = known.names[before], known._without(before)
            else:
                seat, known = known._seat_for(name, round, online, patience)
            known = replace(known, names={**known.names, name: seat})
        parts = {other: bits for other, bits in known.came.items() if other != name}
        return replace(
            known,
            came={**parts, name: came} if came else parts,
            nodes={**{n: other for n, other in known.nodes.items() if other != name}, node: name},
            heard={**known.heard, name: round},
            weights=known.weights if weight is None else {**known.weights, name: weight},
        )

    def seats(self, nodes: Iterable[int], spare: Iterable[int] = ()) -> dict[int, int]:
        """A seat for each of these nodes, by node; nodes for which none is left are left out.

        Nodes that have not answered yet get the free seats for the time being, and then those in `spare`.
        """
        taken = set(self.names.values())
        free = iter([*sorted(set(range(self.clients)) - taken), *spare])
        found: dict[int, int] = {}
        for node in sorted(nodes):
            name = self.nodes.get(node)
            seat = next(free, None) if name is None else self.names[name]
            if seat is not None:
                found[node] = seat
        return found

    def names_of(self, seats: Iterable[int]) -> dict[int, str]:
        """The names of those who have these seats; seats without an owner are left out."""
        owners = {seat: name for name, seat in self.names.items()}
        return {seat: owners[seat] for seat in seats if seat in owners}

    def absent(self, nodes: Iterable[int], round: int, patience: int | None) -> list[int]:
        """Seats of known clients that none of these nodes is, silent for at most `patience` rounds."""
        away = self._away(nodes)
        return sorted(seat for name, seat in away.items() if not self._expired(name, round, patience))

    def expired(self, nodes: Iterable[int], round: int, patience: int | None) -> list[int]:
        """Seats of known clients that none of these nodes is, silent for longer: newcomers may have them."""
        away = self._away(nodes)
        return sorted(seat for name, seat in away.items() if self._expired(name, round, patience))

    def shares(self) -> list[float]:
        """Weight of each seat: as last reported, or the mean of those where none was."""
        known = {self.names[name]: weight for name, weight in self.weights.items()}
        mean = sum(known.values()) / len(known) if known else 1.0
        return [known.get(seat, mean) for seat in range(self.clients)]

    def changed_seats(self, before: Roster) -> list[int]:
        """Seats that had another owner in an earlier roster.

        >>> before = Roster(clients=1).admit(7, "old", 0)
        >>> before.admit(8, "new", 9, patience=2).changed_seats(before)
        [0]
        """
        owners = {seat: name for name, seat in self.names.items()}
        return sorted(seat for name, seat in before.names.items() if owners.get(seat) not in (None, name))

    def to_json(self) -> dict[str, Any]:
        """The roster as plain tables."""
        return {
            "clients": self.clients,
            "names": dict(self.names),
            "nodes": {str(node): name for node, name in self.nodes.items()},
            "heard": dict(self.heard),
            "weights": dict(self.weights),
            "taken": {str(node): count for node, count in self.taken.items()},
            "came": {name: bits.hex() for name, bits in self.came.items()},
        }

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Roster:
        """The inverse of `to_json`."""
        return cls(
            clients=int(table["clients"]),
            names={str(name): int(seat) for name, seat in table["names"].items()},
            nodes={int(node): str(name) for node, name in table["nodes"].items()},
            heard={str(name): int(round) for name, round in table["heard"].items()},
            weights={str(name): float(weight) for name, weight in table["weights"].items()},
            taken={int(node): int(count) for node, count in table["taken"].items()},
            came={str(name): bytes.fromhex(bits) for name, bits in table["came"].items()},
        )

    def _check_claim(
        self, node: int, name: str, round: int, online: Collection[int], patience: int | None
    ) -> None:
        if any(name == node_name(other) for other in {*self.nodes, *online} - {node}):
            raise SafariError(f"client {name!r}: that is another node's name")
        owner = next((n for n, other in self.nodes.items() if other == name), None)
        mine = self.nodes.get(node)
        if mine in (None, name):
            if owner not in (None, node) and owner in online:
                raise SafariError(f"client {name!r} is node {owner}, which is connected")
            return
        if self.taken.get(node, 1) >= MOST_NAMES:
            raise SafariError(f"client {name!r}: the node has had {MOST_NAMES} names and stays {mine!r}")
        if name in self.names and (owner in online or not self._expired(name, round, patience)):
            raise SafariError(f"client {name!r} is node {owner}; this node is client {mine!r}")

    def _seat_for(
        self, name: str, round: int, online: Collection[int], patience: int | None
    ) -> tuple[int, Roster]:
        """A seat for a new name, and the roster without the client that had it."""
        taken = set(self.names.values())
        # Short, because int() of a text of thousands of digits takes long.
        if name.isascii() and name.isdigit() and len(name) < 10 and int(name) < self.clients:
            wanted = int(name)
            if wanted not in taken:
                return wanted, self
        free = next((seat for seat in range(self.clients) if seat not in taken), None)
        if free is not None:
            return free, self
        silent = [n for n in self._away(online) if self._expired(n, round, patience)]
        if not silent:
            raise NoSeatError(name, self.clients)
        # Of two that are silent for as long, the one with the lower seat.
        gone = min(silent, key=lambda n: (self.heard[n], self.names[n]))
        return self.names[gone], self._without(gone)

    def _without(self, name: str) -> Roster:
        return replace(
            self,
            names={n: seat for n, seat in self.names.items() if n != name},
            nodes={node: n for node, n in self.nodes.items() if n != name},
            heard={n: round for n, round in self.heard.items() if n != name},
            weights={n: weight for n, weight in self.weights.items() if n != name},
            came={n: bits for n, bits in self.came.items() if n != name},
        )

    def _away(self, nodes: Iterable[int]) -> dict[str, int]:
        """Known clients that none of these nodes is, with their seats."""
        here = {self.nodes.get(node) for node in nodes}
        return {name: seat for name, seat in self.names.items() if name not in here}

    def _expired(self, name: str, round: int, patience: int | None) -> bool:
        return patience is not None and round - self.heard[name] > patience


class NoSeatError(SafariError):
    """A newcomer for whom no seat is left."""

    def __init__(self, name: str, clients: int):
        super().__init__(
            f"client {name!r} is one too many: clients is {clients}; raise it, or set patience, after "
            "which the seats of silent clients are given away"
        )
