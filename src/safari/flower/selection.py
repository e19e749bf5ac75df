"""Which nodes a round asks, and which clients count as missing because they are not connected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from safari.flower.roster import Roster
from safari.sampling import Draw


@dataclass(frozen=True)
class Selection:
    """`nodes`: to be asked. `absent`: seats of clients that are not connected and count as missing. `spare`:
    seats that nodes without a name may hold for the time being, when no seat is free. `node_shares`, `seat_shares`:
    what each of the nodes and of the absent counts for in the round, where the sampling says so."""

    nodes: tuple[int, ...]
    absent: tuple[int, ...]
    spare: tuple[int, ...]
    node_shares: Mapping[int, float] = field(default_factory=dict, repr=False)
    seat_shares: Mapping[int, float] = field(default_factory=dict, repr=False)

    def shares(self, cohort: Sequence[int], nodes: Mapping[int, int]) -> dict[int, float] | None:
        """Weight of each seat of the cohort; None where the sampling sets no weights.

        `nodes`: the node that finally took each seat: one without a name keeps the weight that it was drawn
        with, whichever seat it takes.
        """
        if not self.node_shares and not self.seat_shares:
            return None
        found = {seat: self.node_shares[n] for seat, n in nodes.items() if n in self.node_shares}
        shares = {seat: found.get(seat, self.seat_shares.get(seat, 0.0)) for seat in cohort}
        # Where none of those who were drawn could be matched to a seat, the round is lost anyway.
        return shares if all(shares.values()) else None


def select(
    roster: Roster,
    online: Sequence[int],
    round: int,
    *,
    cohort: int = 0,
    patience: int | None = None,
    rng: np.random.Generator | None = None,
) -> Selection:
    """A round's selection; `cohort` 0 asks every node that is connected.

    `roster`: the known clients. `online`: the connected nodes, ascending. `patience`: rounds of silence after
    which a disconnected client is no longer counted; None: it always is. `rng`: draws the cohort.

    A node without a name may be a known client that came back with a new id. Such nodes provisionally hold
    the seats of disconnected clients if no seat is free, and are asked like all others.

    A cohort is drawn from all clients that are connected or have been away for at most `patience` rounds: in
    random order, until `cohort` connected ones are found. Disconnected clients drawn before them are missing.
    So as many as wanted are asked, and disconnected clients have the same weight as the others.

    >>> roster = Roster(2).admit(7, "a", 0).admit(8, "b", 0)
    >>> select(roster, [8, 9], 1)      # a is away; 9 may be a, or another client
    Selection(nodes=(8, 9), absent=(0,), spare=(0,))
    """
    absent = roster.absent(online, round, patience)
    spare = (*roster.expired(online, round, patience), *absent)
    seats = roster.seats(online, spare)
    if not cohort or rng is None or cohort >= len({*seats.values(), *absent}):
        return Selection(tuple(online), tuple(absent), spare)
    here = {seat: node for node, seat in seats.items()}
    nodes: list[int] = []
    missing: list[int] = []
    for seat in rng.permutation(sorted({*here, *absent})).tolist():
        if len(nodes) == cohort:
            break
        if seat in here:
            nodes.append(here[seat])
        else:
            missing.append(seat)
    return Selection(tuple(sorted(nodes)), tuple(sorted(missing)), spare)


def select_drawn(
    roster: Roster,
    online: Sequence[int],
    round: int,
    draw: Callable[[np.ndarray], Draw],
    weights: Sequence[float],
    *,
    patience: int | None = None,
) -> Selection:
    """A round's selection by a sampling that gives clients shares; see `select` for the other arguments.

    `draw(weights)` draws from all clients that are connected or have been away for at most `patience` rounds; the
    others have weight 0. One that is drawn and is not connected is missing, with its share. `weights`: what each
    seat counts for.
    """
    absent = roster.absent(online, round, patience)
    spare = (*roster.expired(online, round, patience), *absent)
    here = {seat: node for node, seat in roster.seats(online, spare).items()}
    there = sorted({*here, *absent})
    if not there:
        return Selection(tuple(online), (), spare)
    possible = np.zeros(roster.clients)
    possible[there] = np.asarray(weights, np.float64)[there]
    found = draw(possible)
    nodes = tuple(sorted(here[seat] for seat in found.clients if seat in here))
    missing = tuple(seat for seat in found.clients if seat not in here)
    shares = found.by_client
    if shares is None:
        return Selection(nodes, missing, spare)
    by_node = {here[seat]: share for seat, share in shares.items() if seat in here}
    return Selection(nodes, missing, spare, by_node, {seat: shares[seat] for seat in missing})
