"""Which nodes a round asks, and which clients count as missing because they are not connected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from safari.flower.roster import Roster


@dataclass(frozen=True)
class Selection:
    """`nodes`: to be asked. `absent`: seats of clients that are not connected and count as missing. `spare`:
    seats that nodes without a name may hold for the time being, when no seat is free."""

    nodes: tuple[int, ...]
    absent: tuple[int, ...]
    spare: tuple[int, ...]


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
