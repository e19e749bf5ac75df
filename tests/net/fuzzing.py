"""Datagrams that must not be accepted: mutated, replayed, reordered, truncated, foreign, misdirected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from net.joined import session_for
from safari.net.channel import Channel
from safari.net.fec import Source
from safari.net.pace import Pacing
from safari.net.seal import DOWN, UP, WINDOW, Counts, Drop, Sealer, Session
from safari.net.server import Server

PACING = Pacing(rate=1e9)
KINDS = (
    "bits",
    "bytes",
    "truncated",
    "extended",
    "replayed",
    "reordered",
    "random",
    "foreign",
    "stale",
    "swapped",
    "reflected",
)


@dataclass
class Attack:
    """A server with two clients, their authentic datagrams, and an attacker who has seen all of them."""

    server: Server
    sessions: list[Session]
    honest: list[tuple[bytes, str]]
    stale: list[bytes]
    down: list[bytes]
    # Authentic and never received, but overtaken by more than the window.
    late: list[bytes]

    @classmethod
    def prepare(cls, packets: int = 150) -> Attack:
        source = Source(bytes(3000))
        server = Server(epoch=1, pacing=PACING)
        sessions = [session_for("a"), session_for("b"), session_for("a", round=7)]
        honest: list[tuple[bytes, str]] = []
        stale: list[bytes] = []
        for k, session in enumerate(sessions):
            server.open(session, source, 0.0, 1_000_000)
            end = Channel(session, out=UP, back=DOWN, epoch=2, now=0.0, pacing=PACING, counts=Counts())
            sent = [end.report(False, (5,), padded=True)]
            for i in range(packets):
                head = i.to_bytes(2, "little") + packets.to_bytes(2, "little")
                sent.append(end.data(head + bytes([i]) * (20 + 5 * i), 0.001 * i))
            if k == 2:
                stale = sent
            else:
                honest += [(data, session.identity.client) for data in sent]
        for data in stale:
            server.receive(data, "a", 0.0)
        server.close(sessions[2].id)
        down = [Sealer(session, DOWN, 1).seal(1, bytes(30)) for session in sessions[:2]]
        third = session_for("c")
        server.open(third, source, 0.0, 1_000_000)
        end = Channel(third, out=UP, back=DOWN, epoch=2, now=0.0, pacing=PACING, counts=Counts())
        late = [end.data(b"\0\0\1\0" + bytes(i), 0.0) for i in range(1, 100)]
        end._sealer.counter += WINDOW
        server.receive(end.report(False, (5,), padded=True), "c", 0.0)
        return cls(server, sessions[:2], honest, stale, down, late)

    @property
    def accepted(self) -> int:
        """How many datagrams were accepted on the way here."""
        return len(self.stale) + 1

    def datagrams(self, count: int, rng: np.random.Generator) -> Iterator[tuple[str, bytes]]:
        """This many hostile datagrams, each with its kind; all kinds equally often."""
        pool = [data for data, _ in self.honest]
        picks = rng.integers(0, len(pool), count).tolist()
        seeds = rng.integers(0, 1 << 30, count).tolist()
        for i, (pick, seed) in enumerate(zip(picks, seeds, strict=True)):
            kind = KINDS[i % len(KINDS)]
            yield kind, self._make(kind, pool[pick], seed, rng)

    def _make(self, kind: str, data: bytes, seed: int, rng: np.random.Generator) -> bytes:
        if kind == "bits":
            at = seed % (8 * len(data))
            return data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]
        if kind == "bytes":
            at, more = seed % len(data), 1 + seed % 255
            return data[:at] + bytes([(data[at] + more) % 256]) + data[at + 1 :]
        if kind == "truncated":
            return data[: seed % len(data)]
        if kind == "extended":
            return data + bytes(1 + seed % 2000)
        if kind == "reordered":
            return self.late[seed % len(self.late)]
        if kind == "random":
            return rng.bytes(seed % 1500)
        if kind == "foreign":
            return data[:1] + rng.bytes(8) + data[9:]
        if kind == "stale":
            return self.stale[seed % len(self.stale)]
        if kind == "swapped":
            # Under the other client's name.
            other = self.sessions[data[1:9] == self.sessions[0].id].id
            return data[:1] + other + data[9:]
        if kind == "reflected":
            return self.down[seed % len(self.down)]
        return data


def held(server: Server) -> int:
    """How many things the server keeps, of any kind."""
    peers = server._peers.values()
    of_peers = sum(len(p.packets) + len(p.flying) + len(p.channel._sent_at) for p in peers)
    return (
        of_peers
        + len(server._peers)
        + len(server._retired)
        + len(server._heap)
        + len(server._rates)
        + len(server._trips)
    )


def expected() -> dict[str, set[Drop]]:
    """The reasons for which each kind may be dropped; nothing else, and never accepted."""
    damaged = {Drop.FORGED, Drop.FOREIGN, Drop.REPLAYED}
    return {
        "bits": damaged,
        "bytes": damaged,
        "truncated": {Drop.TRUNCATED, Drop.FORGED, Drop.REPLAYED},
        "extended": {Drop.OVERSIZED, Drop.FORGED, Drop.REPLAYED},
        "replayed": {Drop.REPLAYED},
        "reordered": {Drop.REPLAYED},
        "random": {Drop.TRUNCATED, Drop.FOREIGN},
        "foreign": {Drop.FOREIGN},
        "stale": {Drop.STALE},
        "swapped": {Drop.FORGED, Drop.REPLAYED},
        "reflected": {Drop.FORGED, Drop.REPLAYED},
    }
