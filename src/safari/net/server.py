"""The server's end of all sessions, without sockets or clock: bytes and `now` in, datagrams out.

A session begins when the round is announced through the control channel, and ends when the server closes
it. Nothing is sent to an address before an authentic request came from it, and little before it has proved that
it receives: the server cannot be used to flood a third party.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count

from safari.errors import SafariError
from safari.net.channel import Channel, Data, Report
from safari.net.client import MOST_PACKETS, UPLOAD_HEAD
from safari.net.fec import SPARE, Source
from safari.net.pace import Pacing
from safari.net.seal import DATAGRAM, DOWN, UP, Counts, Drop, Session, session_of

Address = Hashable
Datagram = tuple[bytes, Address]

# Datagrams allowed to an address that has not been validated: an initial allowance, and an increment for each
# full-size request from there.
UNPROVEN, FOR_A_REQUEST = 32, 2
# Closed sessions that are remembered, to count their datagrams as stale rather than foreign.
_RETIRED = 65_536
# Lower bound for the estimated share of datagrams that are delivered.
_LEAST_SHARE = 0.05
# A datagram counts as lost after the first number of round trips plus the second number of seconds.
_PATIENCE = 1.5, 0.1


@dataclass(frozen=True)
class Upload:
    """The result of a session: packets of the wire format by number, out of `total` (0: unknown).

    `asked`: an authentic datagram was received. `informed`: the client has the whole broadcast.
    """

    packets: dict[int, bytes]
    total: int
    asked: bool
    informed: bool
    sent: int
    bytes_sent: int
    bytes_received: int
    # Seconds; of an earlier session where this one has not measured it, infinite where none has.
    round_trip: float = math.inf
    # When the last authentic datagram was received, by the clock of `now`.
    heard_at: float = -math.inf

    @property
    def complete(self) -> bool:
        """Every packet was received."""
        return 0 < self.total == len(self.packets)


@dataclass
class _Peer:
    """A session as the server sees it."""

    session: Session
    channel: Channel
    source: Source
    most_bytes: int
    address: Address | None = None
    # The counter of the first datagram sent to the present address.
    first_counter: int = 0
    # Datagrams sent to unvalidated addresses, and how many are allowed.
    unproven: int = 0
    allowance: int = UNPROVEN
    proven: bool = False
    informed: bool = False
    # For each chunk: the number of the next symbol, and how many are planned in all.
    following: list[int] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)
    # (counter, time, chunk) of datagrams in flight.
    flying: deque[tuple[int, float, int]] = field(default_factory=deque)
    packets: dict[int, bytes] = field(default_factory=dict)
    total: int = 0
    stored: int = 0
    bytes_received: int = 0
    heard_at: float = -math.inf
    due: float | None = None

    @property
    def may_send(self) -> bool:
        return self.address is not None and (self.proven or self.unproven < self.allowance)

    @property
    def chunk(self) -> int | None:
        """The chunk of the next symbol to send: of those with symbols planned, the one with the fewest sent."""
        if self.informed:
            return None
        open_ = [c for c in range(len(self.planned)) if self.following[c] < self.planned[c]]
        return min(open_, key=lambda c: (self.following[c], c), default=None)


class Server:
    """The server's end of many sessions.

    Args:
        epoch: When this process began, in milliseconds.
        pacing: How fast to send to each client.
        repair: Symbols sent to each client beyond those of the message, before it has reported, as a share of
            them: about what the downlinks usually lose.
        excess: A client is sent at most this multiple of the message.
    """

    def __init__(
        self,
        *,
        epoch: int,
        pacing: Pacing | None = None,
        repair: float = 0.05,
        excess: float = 8.0,
    ):
        for name, value, least in (("repair", repair, 0), ("excess", excess, 1)):
            if not value >= least:
                raise SafariError(f"{name} must be at least {least}, got {value}")
        self.counts = Counts()
        # Number of complete uploads.
        self.completed = 0
        self._epoch, self._pacing = epoch, pacing or Pacing()
        self._repair, self._excess = repair, excess
        self._peers: dict[bytes, _Peer] = {}
        self._retired: set[bytes] = set()
        self._retired_order: deque[bytes] = deque()
        self._rates: dict[str, float] = {}
        # Round-trip times of earlier sessions, for those in which none was measured.
        self._trips: dict[str, float] = {}
        self._heap: list[tuple[float, int, _Peer]] = []
        self._tie = count()

    def open(
        self, session: Session, source: Source, now: float, most_bytes: int, pacing: Pacing | None = None
    ) -> None:
        """Begin a session: this client may ask for the broadcast and upload at most `most_bytes`.

        `pacing`: how fast to send to it, where not as to all.
        """
        if session.id in self._peers or session.id in self._retired:
            raise SafariError(f"session {session.id.hex()} must be new: it has been used before")
        channel = Channel(
            session,
            out=DOWN,
            back=UP,
            epoch=self._epoch,
            now=now,
            pacing=pacing or self._pacing,
            counts=self.counts,
            rate=self._rates.get(session.identity.client),
        )
        symbols = source.shape.symbols
        planned = [k + SPARE + int(k * self._repair) for k in symbols]
        self._peers[session.id] = _Peer(
            session, channel, source, most_bytes, following=[0] * len(symbols), planned=planned
        )

    def close(self, session: bytes) -> Upload:
        """End a session; its datagrams are stale from now on."""
        upload, peer = self.look(session), self._peers.pop(session)
        if peer.address is not None:
            self._rates[peer.session.identity.client] = peer.channel.pacer.learned()
        if upload.round_trip < math.inf:
            self._trips[peer.session.identity.client] = upload.round_trip
        peer.due = None
        self._retired.add(session)
        self._retired_order.append(session)
        if len(self._retired_order) > _RETIRED:
            self._retired.discard(self._retired_order.popleft())
        return upload

    def look(self, session: bytes) -> Upload:
        """The upload so far."""
        peer = self._peers.get(session)
        if peer is None:
            raise SafariError(f"session {session.hex()} must be open: it is not")
        trip = peer.channel.round_trip
        if trip == math.inf:
            trip = self._trips.get(peer.session.identity.client, math.inf)
        return Upload(
            dict(peer.packets),
            peer.total,
            peer.address is not None,
            peer.informed,
            peer.channel.sent,
            peer.channel.bytes_sent,
            peer.bytes_received,
            trip,
            peer.heard_at,
        )

    def complete(self, session: bytes) -> bool:
        """Whether every packet of this open session was received."""
        peer = self._peers[session]
        return 0 < peer.total == len(peer.packets)

    def receive(self, data: bytes, address: Address, now: float) -> None:
        """Process a datagram from the network; it need not be authentic."""
        found = session_of(data)
        if isinstance(found, Drop):
            self.counts.drop(found)
            return
        peer = self._peers.get(found)
        if peer is None:
            self.counts.drop(Drop.STALE if found in self._retired else Drop.FOREIGN)
            return
        message = peer.channel.receive(data, now)
        if message is None:
            return
        peer.bytes_received += len(data)
        peer.heard_at = now
        if message.newest and address != peer.address:
            self._move(peer, address)
        peer.allowance += FOR_A_REQUEST * (len(data) >= DATAGRAM)
        if isinstance(message, Data):
            self.counts.note(self._packet(peer, message.payload))
        else:
            self.counts.note(None)
            self._report(peer, message, now)
        self._schedule(peer, now)

    def poll(self, now: float) -> list[Datagram]:
        """The datagrams to send now, and where to."""
        out: list[Datagram] = []
        while self._heap and self._heap[0][0] <= now:
            at, _, peer = heapq.heappop(self._heap)
            # Only the latest entry of a session counts.
            if peer.due == at:
                peer.due = None
                self._serve(peer, now, out)
                self._schedule(peer, now)
        return out

    def next_time(self) -> float | None:
        """When to call `poll` again at the latest, unless something is received; None: never."""
        while self._heap and self._heap[0][2].due != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _move(self, peer: _Peer, address: Address) -> None:
        peer.address, peer.proven, peer.first_counter = address, False, peer.channel.counter

    def _packet(self, peer: _Peer, payload: bytes) -> Drop | None:
        number, total = (
            int.from_bytes(payload[:2], "little"),
            int.from_bytes(payload[2:UPLOAD_HEAD], "little"),
        )
        wrong = len(payload) <= UPLOAD_HEAD or not number < total <= MOST_PACKETS
        if wrong or (peer.total and total != peer.total):
            return Drop.MALFORMED
        if number in peer.packets or peer.stored + len(payload) > peer.most_bytes:
            return Drop.UNWANTED
        peer.total = total
        peer.packets[number] = payload[UPLOAD_HEAD:]
        peer.stored += len(payload)
        self.completed += len(peer.packets) == total
        # A client that uploads has the broadcast.
        peer.informed = True
        return None

    def _report(self, peer: _Peer, report: Report, now: float) -> None:
        # Only what was sent to the present address can be known from there.
        peer.proven |= report.received > 0 and report.highest >= peer.first_counter
        peer.informed |= report.complete
        if not report.newest or len(report.missing) != len(peer.planned):
            return
        trips, seconds = _PATIENCE
        lost_before = now - trips * peer.channel.round_trip - seconds
        while peer.flying and (
            (report.received and peer.flying[0][0] <= report.highest) or peer.flying[0][1] < lost_before
        ):
            peer.flying.popleft()
        share = max(report.delivered or 1.0, _LEAST_SHARE)
        for chunk, missing in enumerate(report.missing):
            waiting = peer.planned[chunk] - peer.following[chunk]
            if report.received:
                lacking = missing - share * sum(1 for *_, c in peer.flying if c == chunk)
                more = _enough(lacking, share) - waiting
            else:
                # Nothing was received, or not yet: proceed in small steps.
                more = FOR_A_REQUEST * bool(missing) - waiting
            symbols = peer.source.shape.symbols[chunk]
            most = int(self._excess * symbols) + UNPROVEN
            # At most one more copy of the message before the next report.
            peer.planned[chunk] = min(peer.planned[chunk] + max(min(more, symbols), 0), most)

    def _serve(self, peer: _Peer, now: float, out: list[Datagram]) -> None:
        channel = peer.channel
        if peer.address is None:
            return
        due = channel.report_at()
        if due is not None and due <= now:
            out.append((channel.report(), peer.address))
        while (chunk := peer.chunk) is not None and peer.may_send and channel.pacer.ready(now):
            peer.flying.append((channel.counter, now, chunk))
            data = channel.data(peer.source.symbol(chunk, peer.following[chunk]), now)
            peer.following[chunk] += 1
            peer.unproven += not peer.proven
            out.append((data, peer.address))

    def _schedule(self, peer: _Peer, now: float) -> None:
        times = []
        if peer.address is not None and (due := peer.channel.report_at()) is not None:
            times.append(due)
        if peer.may_send and peer.chunk is not None:
            times.append(peer.channel.pacer.next_at())
        due = min(times, default=None)
        if due is not None and due != peer.due:
            heapq.heappush(self._heap, (due, next(self._tie), peer))
        peer.due = due


def _enough(wanted: float, share: float) -> int:
    """Number of symbols to send so that `wanted` arrive nearly always, each with the probability `share`.

    >>> _enough(10, 1.0), _enough(10, 0.5), _enough(0, 0.5)
    (10, 27, 0)
    """
    if wanted <= 0:
        return 0
    return math.ceil((wanted + 1.5 * math.sqrt(wanted * (1 - share))) / share)
