"""One end of a session: datagrams sealed and opened, delay measured, rates learned. No sockets, no clock.

Two kinds of datagrams carry, once opened,

    DATA    4 bytes stamp | payload
    REPORT  1 byte flags | 4 bytes received | 6 bytes highest | 4 bytes lag
            | 2 bytes chunks | 2 bytes for each chunk | zeros

A stamp is the sender's clock in units of 0.1 ms. A report states how many data datagrams were received, the highest
counter among them, and the least lag (the receiver's clock minus the stamp: the one-way delay up to a
constant) since the report before. A client's report adds how many symbols of each chunk of the broadcast it
still lacks. As long as it has nothing, it fills its reports with zeros to the size of a full datagram, so
that a request is not shorter than what it causes to be sent to its address.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from safari.net.fec import MOST_CHUNKS
from safari.net.pace import Pacer, Pacing
from safari.net.seal import DATAGRAM, OVERHEAD, Counts, Drop, Opened, Opener, Sealer, Session

DATA, REPORT = 1, 2
STAMP_BYTES = 4
PAYLOAD = DATAGRAM - OVERHEAD - STAMP_BYTES
REPORT_BYTES = 17
# The client holds the whole broadcast; the report has a lag in it.
COMPLETE, LAG = 1, 2

_TICK = 1e-4
_WRAP = 1 << 32
# A report is due after this many datagrams or seconds, whichever comes first.
_REPORT_EVERY = 32
_REPORT_SECONDS = 0.05
# Send times are kept for this many datagrams: a round trip is measured with the newest that was reported.
_REMEMBERED = 8192
_PRIOR = 4
# Reports closer together than this are useless for estimating a rate.
_LEAST_SPAN = 0.04


@dataclass(frozen=True)
class Data:
    """A payload that arrived; `newest` as in `Opened`."""

    payload: bytes
    newest: bool


@dataclass(frozen=True)
class Report:
    """Report of the other end on the datagrams that it has received.

    `missing`: symbols of each chunk of the broadcast that a client still lacks. `delivered`: the share of our
    data, up to the newest datagram that it has seen, that arrived; None if it has seen none.
    """

    complete: bool
    received: int
    highest: int
    missing: tuple[int, ...]
    delivered: float | None
    newest: bool


Message = Data | Report


class Channel:
    """One end of a session.

    Args:
        session: What the control channel handed out.
        out: The direction in which this end sends, "up" or "down".
        back: The other one.
        epoch: When this process began, in milliseconds.
        now: The present, in seconds of any clock that only moves forward.
        pacing: How fast this end may send.
        counts: Where to count what arrives.
        rate: A rate that an earlier session has learned.
    """

    def __init__(
        self,
        session: Session,
        *,
        out: str,
        back: str,
        epoch: int,
        now: float,
        pacing: Pacing,
        counts: Counts,
        rate: float | None = None,
    ):
        self.pacer = Pacer(pacing, now, rate)
        self.counts = counts
        self.received = 0
        self.sent = 0
        self.bytes_sent = 0
        # Seconds; infinite until measured.
        self.round_trip = float("inf")
        self._sealer = Sealer(session, out, epoch)
        self._opener = Opener(session, back)
        self._zero = now
        # Counter of each datagram with data: when it went, and how many had gone before.
        self._sent_at: OrderedDict[int, tuple[float, int]] = OrderedDict()
        self._newest_data = -1
        self._unreported = 0
        self._report_at: float | None = None
        self._lag: int | None = None
        self._first_lag: int | None = None
        # When a report arrived, and how much of our data it accounted for.
        self._through_from: tuple[float, int] | None = None
        self._through = float("inf")

    @property
    def counter(self) -> int:
        """The counter of the next datagram."""
        return self._sealer.counter

    def receive(self, data: bytes, now: float) -> Message | None:
        """Decode a datagram of this session; None if it was dropped, and counted as such.

        Accepted datagrams are counted by the caller.
        """
        opened = self._opener.open(data)
        if isinstance(opened, Drop):
            self.counts.drop(opened)
            return None
        message = self._data(opened, now) if opened.kind == DATA else self._report(opened, now)
        if message is None:
            self.counts.drop(Drop.MALFORMED)
        return message

    def data(self, payload: bytes, now: float) -> bytes:
        """A datagram with data; its size is taken from the pace."""
        self._sent_at[self._sealer.counter] = now, self.sent
        if len(self._sent_at) > _REMEMBERED:
            self._sent_at.popitem(last=False)
        sealed = self._sealer.seal(DATA, self._clock(now).to_bytes(STAMP_BYTES, "little") + payload)
        self.sent += 1
        self.bytes_sent += len(sealed)
        self.pacer.spend(now, len(sealed))
        return sealed

    def report(self, complete: bool = False, missing: tuple[int, ...] = (), padded: bool = False) -> bytes:
        """A datagram that reports what was received so far."""
        flags = COMPLETE * complete + LAG * (self._lag is not None)
        body = (
            bytes([flags])
            + self.received.to_bytes(4, "little")
            + max(self._newest_data, 0).to_bytes(6, "little")
            + (self._lag or 0).to_bytes(4, "little")
            + len(missing).to_bytes(2, "little")
            + b"".join(min(count, 0xFFFF).to_bytes(2, "little") for count in missing)
        )
        if padded:
            body = body.ljust(DATAGRAM - OVERHEAD, b"\0")
        self._unreported, self._report_at, self._lag = 0, None, None
        return self._sealer.seal(REPORT, body)

    def report_now(self, now: float) -> None:
        """Make a report due at once."""
        self._report_at = now

    def report_at(self) -> float | None:
        """When the next report is due; None: there is nothing new to report."""
        return self._report_at

    def _data(self, opened: Opened, now: float) -> Data | None:
        if len(opened.body) <= STAMP_BYTES:
            return None
        stamp = int.from_bytes(opened.body[:STAMP_BYTES], "little")
        lag = (self._clock(now) - stamp) % _WRAP
        self._lag = lag if self._lag is None or _signed(lag - self._lag) < 0 else self._lag
        self.received += 1
        self._newest_data = opened.counter if opened.newest else max(self._newest_data, opened.counter)
        self._unreported += 1
        due = now if self._unreported >= _REPORT_EVERY else now + _REPORT_SECONDS
        self._report_at = due if self._report_at is None else min(self._report_at, due)
        return Data(opened.body[STAMP_BYTES:], opened.newest)

    def _report(self, opened: Opened, now: float) -> Report | None:
        body = opened.body
        if opened.kind != REPORT or len(body) < REPORT_BYTES:
            return None
        end = REPORT_BYTES + 2 * int.from_bytes(body[15:REPORT_BYTES], "little")
        if end > min(len(body), REPORT_BYTES + 2 * MOST_CHUNKS):
            return None
        received, highest = int.from_bytes(body[1:5], "little"), int.from_bytes(body[5:11], "little")
        before = self._sent_at.get(highest)
        delivered = None
        if received and before is not None:
            known = before[1] + 1
            # Pseudo-observations of delivered datagrams, so that a loss burst at the start is not extrapolated.
            delivered = min(1.0, (received + _PRIOR) / (known + _PRIOR))
        # A report that was overtaken by a newer one is out of date.
        if body[0] & LAG and before is not None and opened.newest:
            self.round_trip = now - before[0]
            lag = int.from_bytes(body[11:15], "little")
            self._first_lag = lag if self._first_lag is None else self._first_lag
            self._measure_through(now, before[1])
            delay = _TICK * _signed(lag - self._first_lag)
            self.pacer.on_delay(now, delay, self.round_trip, self._through)
        missing = tuple(int.from_bytes(body[at : at + 2], "little") for at in range(REPORT_BYTES, end, 2))
        return Report(bool(body[0] & COMPLETE), received, highest, missing, delivered, opened.newest)

    def _measure_through(self, now: float, decided: int) -> None:
        start, earlier = self._through_from or (now, decided)
        if now - start >= _LEAST_SPAN and decided > earlier:
            self._through = (decided - earlier) * DATAGRAM / (now - start)
            start, earlier = now, decided
        self._through_from = start, earlier

    def _clock(self, now: float) -> int:
        return int((now - self._zero) / _TICK) % _WRAP


def _signed(difference: int) -> int:
    """A difference of two 32-bit numbers that may have wrapped around.

    >>> _signed(2**32 - 5), _signed(5)
    (-5, 5)
    """
    return (difference + _WRAP // 2) % _WRAP - _WRAP // 2
