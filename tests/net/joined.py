"""A server and clients joined in memory by lossy paths, in virtual time: a run is a function of its seed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from safari.net.client import Client, Expired, Ready, Sent
from safari.net.fec import Source
from safari.net.pace import Pacing
from safari.net.path import Conditions, Path
from safari.net.seal import Session
from safari.net.server import Server
from safari.wire.identity import Identity

MODEL = bytes(range(8))


def session_for(name: str, round: int = 0, seed: int = 0) -> Session:
    rng = np.random.default_rng([seed, round, *name.encode()])
    return Session.fresh(Identity(name, round, MODEL), rng.bytes)


@dataclass
class Story:
    """What one client lived through."""

    ready: float | None = None
    message: bytes | None = None
    sent: float | None = None
    expired: Expired | None = None


@dataclass
class Net:
    """One server, several clients, a path up and a path down for each."""

    server: Server
    source: Source
    clients: list[Client]
    sessions: list[Session]
    up: list[Path]
    down: list[Path]
    packets: list[list[bytes]]
    train: float = 0.0
    now: float = 0.0
    stories: list[Story] = field(default_factory=list)
    steps: int = 0

    @classmethod
    def start(
        cls,
        message: bytes,
        packets: list[list[bytes]],
        up: Conditions,
        down: Conditions,
        *,
        deadline: float = 30.0,
        seed: int = 0,
        pacing: Pacing | None = None,
        train: float = 0.0,
        **server,
    ) -> Net:
        source = Source(message)
        end = Server(epoch=1, pacing=pacing, **server)
        sessions = [session_for(f"client {i}", seed=seed) for i in range(len(packets))]
        for session in sessions:
            end.open(session, source, 0.0, most_bytes=10_000_000)
        clients = [
            Client(
                session, source.shape, now=0.0, deadline=deadline, epoch=2,
                rng=np.random.default_rng([seed, i]), pacing=pacing,
            )
            for i, session in enumerate(sessions)
        ]  # fmt: skip
        paths = [
            [Path(c, np.random.default_rng([seed, i, k])) for i in range(len(packets))]
            for k, c in enumerate((up, down))
        ]
        return cls(end, source, clients, sessions, *paths, packets, train, stories=[Story() for _ in packets])

    def run(self, until: float = 1000.0, steps: int = 400_000) -> Net:
        """Until nothing is left to happen."""
        upload_at: dict[int, float] = {}
        while True:
            self.steps += 1
            assert self.steps < steps, "the two ends keep each other busy for ever"
            for i, client in enumerate(self.clients):
                for data, _ in self.down[i].due(self.now):
                    client.receive(data, self.now)
                for data, _ in self.up[i].due(self.now):
                    self.server.receive(data, i, self.now)
                while (event := client.next_event()) is not None:
                    self._note(i, event, upload_at)
                if i in upload_at and upload_at[i] <= self.now:
                    del upload_at[i]
                    client.upload(self.packets[i], self.now)
                for data in client.poll(self.now):
                    self.up[i].send(data, self.now)
                while (event := client.next_event()) is not None:
                    self._note(i, event, upload_at)
            for data, i in self.server.poll(self.now):
                self.down[i].send(data, self.now)
            ends = [self.server, *self.clients, *self.up, *self.down]
            times = [t for end in ends if (t := end.next_time()) is not None] + list(upload_at.values())
            following = min(times, default=until)
            if following >= until:
                return self
            self.now = max(self.now + 1e-6, following)

    def _note(self, i: int, event, upload_at: dict[int, float]) -> None:
        story = self.stories[i]
        if isinstance(event, Ready):
            story.ready, story.message = self.now, event.message
            upload_at[i] = self.now + self.train
        elif isinstance(event, Sent):
            story.sent = self.now
        else:
            story.expired = event
