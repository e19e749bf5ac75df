"""Who is who: names that last, over nodes that come and go, each with a seat at the aggregation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from safari.errors import SafariError


@dataclass(frozen=True)
class Roster:
    """Clients by name. A name has a seat from 0 to `clients` - 1, for good; a node has a name for now.

    A name that is a number gets the seat of that number where it is free, so that partition 3 is client 3;
    any other gets the lowest free one.

    >>> roster = Roster(clients=3).meet(node=77, name="2", round=0).meet(node=55, name="berlin", round=0)
    >>> roster.seats([55, 77, 99])     # 99 has not spoken yet: the lowest free seat, for the time being
    {55: 0, 77: 2, 99: 1}
    >>> roster.meet(node=88, name="berlin", round=5).seats([88, 55])    # berlin came back as another node
    {55: 1, 88: 0}
    """

    clients: int
    names: Mapping[str, int] = field(default_factory=dict)
    nodes: Mapping[int, str] = field(default_factory=dict)
    heard: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

    def meet(self, node: int, name: str, round: int, weight: float | None = None) -> Roster:
        """The roster after a node has answered under a name; SafariError when no seat is left for it."""
        names = self.names if name in self.names else {**self.names, name: self._seat_for(name)}
        nodes = {n: known for n, known in self.nodes.items() if known != name}
        weights = self.weights if weight is None else {**self.weights, name: weight}
        return replace(
            self,
            names=names,
            nodes={**nodes, node: name},
            heard={**self.heard, name: round},
            weights=weights,
        )

    def seats(self, nodes: Iterable[int]) -> dict[int, int]:
        """A seat for each of these nodes, by node; nodes for which none is left are left out."""
        free = iter(sorted(set(range(self.clients)) - set(self.names.values())))
        found: dict[int, int] = {}
        for node in sorted(nodes):
            name = self.nodes.get(node)
            seat = next(free, None) if name is None else self.names[name]
            if seat is not None:
                found[node] = seat
        return found

    def absent(self, nodes: Iterable[int], round: int, patience: int | None) -> list[int]:
        """Seats of known clients that none of these nodes is, silent for at most `patience` rounds."""
        here = {self.nodes.get(node) for node in nodes}
        return sorted(
            seat
            for name, seat in self.names.items()
            if name not in here and (patience is None or round - self.heard[name] <= patience)
        )

    def shares(self) -> list[float]:
        """What each seat counts for: as last reported; the mean of these where nothing was."""
        known = {self.names[name]: weight for name, weight in self.weights.items()}
        mean = sum(known.values()) / len(known) if known else 1.0
        return [known.get(seat, mean) for seat in range(self.clients)]

    def to_json(self) -> dict[str, Any]:
        """The roster as plain tables."""
        return {
            "clients": self.clients,
            "names": dict(self.names),
            "nodes": {str(node): name for node, name in self.nodes.items()},
            "heard": dict(self.heard),
            "weights": dict(self.weights),
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
        )

    def _seat_for(self, name: str) -> int:
        taken = set(self.names.values())
        # Short, because int() of a text of thousands of digits takes long.
        if name.isascii() and name.isdigit() and len(name) < 10 and int(name) < self.clients:
            wanted = int(name)
            if wanted not in taken:
                return wanted
        free = next((seat for seat in range(self.clients) if seat not in taken), None)
        if free is None:
            raise SafariError(f"client {name!r} is one too many: clients is {self.clients}")
        return free
