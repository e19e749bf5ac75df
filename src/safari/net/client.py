"""The client's end of a round, without sockets or clock: bytes and `now` in, datagrams and events out.

ask for the broadcast, report what came     until the message is whole, or the deadline has passed
(train)
send each packet of the update once         at the pace; nothing is acknowledged, nothing sent again
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from safari.errors import SafariError
from safari.net.channel import PAYLOAD, Channel, Data
from safari.net.fec import Shape, Sink
from safari.net.pace import Pacing
from safari.net.seal import DOWN, UP, Counts, Drop, Session, session_of

# In front of each packet of an upload: its number, and how many there are.
UPLOAD_HEAD = 4
# The longest packet that fits.
PACKET = PAYLOAD - UPLOAD_HEAD
MOST_PACKETS = 0xFFFF

# Seconds between unanswered requests: initial, maximum, and the maximum once some symbols were received: then
# the reports, or the answers to them, must have been lost.
_FIRST_PAUSE, _LONGEST_PAUSE, _PAUSE_BETWEEN, _GROWTH = 0.1, 0.5, 0.25, 1.5


@dataclass(frozen=True)
class Ready:
    """The broadcast is whole."""

    message: bytes


@dataclass(frozen=True)
class Expired:
    """The deadline passed: before the broadcast was whole, or with packets that were never sent.

    `received` symbols arrived; about `needed` would have been enough.
    """

    received: int
    needed: int
    unsent: int


@dataclass(frozen=True)
class Sent:
    """All packets of the update are on their way."""

    packets: int


Event = Ready | Expired | Sent


class _Phase(Enum):
    ASK, HOLD, SEND, OVER = range(4)


class Client:
    """The client's end of one session.

    Args:
        session: From the control channel.
        shape: Likewise: length and digest of the broadcast.
        now: The present, in seconds of any clock that only moves forward.
        deadline: When the round ends, by the same clock.
        epoch: When this process began, in milliseconds.
        rng: Draws the order in which packets are sent, so that a deadline or a full queue does not cut off
            the same layers each time.
        pacing: How fast to send.
        rate: A rate that an earlier round has learned.
    """

    def __init__(
        self,
        session: Session,
        shape: Shape,
        *,
        now: float,
        deadline: float,
        epoch: int,
        rng: np.random.Generator,
        pacing: Pacing | None = None,
        rate: float | None = None,
    ):
        self.counts = Counts()
        self.channel = Channel(
            session,
            out=UP,
            back=DOWN,
            epoch=epoch,
            now=now,
            pacing=pacing or Pacing(),
            counts=self.counts,
            rate=rate,
        )
        self._session, self._deadline, self._rng = session.id, deadline, rng
        self._sink = Sink(shape)
        self._phase = _Phase.ASK
        self._ask_at, self._pause = now, _FIRST_PAUSE
        self._queue: deque[bytes] = deque()
        self._packets = 0
        self._events: deque[Event] = deque()

    @property
    def received(self) -> int:
        """Number of received symbols of the broadcast."""
        return self._sink.received

    @property
    def unsent(self) -> int:
        """Packets of the update that have not been sent yet."""
        return len(self._queue)

    def next_event(self) -> Event | None:
        """The next event, in order of occurrence; None if there is none."""
        return self._events.popleft() if self._events else None

    def receive(self, data: bytes, now: float) -> None:
        """Process a datagram from the network; it need not be authentic."""
        found = session_of(data)
        if isinstance(found, Drop):
            self.counts.drop(found)
        elif found != self._session:
            self.counts.drop(Drop.FOREIGN)
        else:
            message = self.channel.receive(data, now)
            if message is not None:
                reason = self._symbol(message.payload, now) if isinstance(message, Data) else None
                self.counts.note(reason)

    def upload(self, packets: Sequence[bytes], now: float) -> None:
        """Send these packets of the wire format, each once, at the pace."""
        if self._phase is not _Phase.HOLD:
            raise SafariError(
                "packets can be uploaded once, after the broadcast came and before the deadline"
            )
        if not 1 <= len(packets) <= MOST_PACKETS:
            raise SafariError(f"an upload must hold 1 to {MOST_PACKETS} packets, got {len(packets)}")
        longest = max(map(len, packets))
        if longest > PACKET:
            raise SafariError(f"a packet must hold at most {PACKET} bytes, got {longest}")
        total = len(packets).to_bytes(2, "little")
        order = self._rng.permutation(len(packets)).tolist()
        self._queue.extend(int(i).to_bytes(2, "little") + total + packets[i] for i in order)
        self._packets, self._phase = len(packets), _Phase.SEND

    def poll(self, now: float) -> list[bytes]:
        """The datagrams to send now."""
        if self._phase is _Phase.OVER:
            return []
        if now >= self._deadline:
            self._expire()
            return []
        out = []
        asks = self._phase is _Phase.ASK and self._ask_at <= now
        due = self.channel.report_at()
        if asks or (due is not None and due <= now):
            complete, missing = self._sink.message is not None, self._sink.missing()
            # An unanswered request is padded to full size, which allows the server to send to a new address.
            out.append(self.channel.report(complete, missing, padded=asks))
        if asks:
            self._ask_at = now + self._pause
            longest = _PAUSE_BETWEEN if self._sink.received else _LONGEST_PAUSE
            self._pause = min(self._pause * _GROWTH, longest)
        while self._queue and self.channel.pacer.ready(now):
            out.append(self.channel.data(self._queue.popleft(), now))
        if self._phase is _Phase.SEND and not self._queue:
            self._phase = _Phase.OVER
            self._events.append(Sent(self._packets))
        return out

    def next_time(self) -> float | None:
        """When to call `poll` again at the latest, unless something is received; None: never."""
        if self._phase is _Phase.OVER:
            return None
        times = [self._deadline]
        if self._phase is _Phase.ASK:
            times.append(self._ask_at)
        if (due := self.channel.report_at()) is not None:
            times.append(due)
        if self._queue:
            times.append(self.channel.pacer.next_at())
        return min(times)

    def _symbol(self, payload: bytes, now: float) -> Drop | None:
        if self._phase is not _Phase.ASK:
            return Drop.UNWANTED
        if not self._sink.add(payload):
            return Drop.MALFORMED
        self._pause = _FIRST_PAUSE
        self._ask_at = max(self._ask_at, now + self._pause)
        message = self._sink.message
        if message is not None:
            self._phase = _Phase.HOLD
            # Before training: the server learns that nothing more is needed, and the round-trip time, by which
            # it knows how long the last packets of the upload may take.
            self.channel.report_now(now)
            self._events.append(Ready(message))
        return None

    def _expire(self) -> None:
        needed = sum(self._sink.shape.symbols)
        self._phase = _Phase.OVER
        self._events.append(Expired(self._sink.received, needed, len(self._queue)))
        self._queue.clear()
