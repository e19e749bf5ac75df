"""The one file that touches sockets: it moves datagrams between them and the ends, and keeps the time."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from safari.errors import SafariError
from safari.net.client import Client, Expired, Ready, Sent
from safari.net.fec import Source
from safari.net.offer import Offer
from safari.net.pace import Pacing
from safari.net.path import Conditions, Path
from safari.net.seal import LONGEST, Counts, Session
from safari.net.server import Server, Upload

# Socket buffers requested from the kernel, which may grant less.
_BUFFER = 8_000_000
# Datagrams read from a socket before other work is done.
_AT_ONCE = 256
# A timer that fires more often than this costs more than it gains.
_GRAIN = 0.001
# Linux only: beyond the limit that an administrator has set, where allowed.
_FORCE = {socket.SO_RCVBUF: 33, socket.SO_SNDBUF: 32}

# Seconds without a datagram after which an upload is over, beyond a round trip, and where that is not known.
_LAST_MOMENT, _UNKNOWN_TRIP, _LOOK = 0.3, 1.0, 0.02

clock = time.monotonic


class _End(Protocol):
    """A protocol without sockets."""

    def next_time(self) -> float | None: ...


def epoch() -> int:
    """Now, in milliseconds: what a process begins to count its datagrams with."""
    return time.time_ns() // 1_000_000


class _Pump:
    """Moves datagrams between a socket and one end, inside an event loop."""

    def __init__(
        self,
        sock: socket.socket,
        end: _End,
        receive: Callable[[bytes, Any, float], None],
        poll: Callable[[float], Sequence[tuple[bytes, Any]]],
        send: Callable[[bytes, Any], int],
        after: Callable[[], None] | None = None,
    ):
        self._sock, self._end, self._receive, self._poll = sock, end, receive, poll
        self._send, self._after = send, after
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock.fileno(), self._readable)
        self.wake()

    def wake(self) -> None:
        """Send what is due, and set the timer for what is next."""
        for data, address in self._poll(clock()):
            # A full buffer, an ICMP error, a missing route: lost, as any datagram may be.
            with contextlib.suppress(OSError):
                self._send(data, address)
        if self._after is not None:
            self._after()
        if self._timer is not None:
            self._timer.cancel()
        at = self._end.next_time()
        self._timer = None if at is None else self._loop.call_later(max(at - clock(), _GRAIN), self.wake)

    def stop(self) -> None:
        """Leave the socket alone."""
        self._loop.remove_reader(self._sock.fileno())
        if self._timer is not None:
            self._timer.cancel()

    def _readable(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                data, address = self._sock.recvfrom(LONGEST + 1)
            except BlockingIOError:
                break
            except OSError:
                # An ICMP error, for instance a closed port, is reported here; the port may open again.
                continue
            self._receive(data, address, clock())
        self.wake()


class ServerSocket:
    """The server's end on a UDP port, in a thread of its own. Use it in a `with` statement.

    Args:
        host: The address to listen on.
        port: Likewise; 0: any free one, see `port`.
        pacing: How fast to send to each client.
        options: Further arguments of `Server`.
    """

    def __init__(self, host: str, port: int = 0, *, pacing: Pacing | None = None, **options: Any):
        self._core = Server(epoch=epoch(), pacing=pacing, **options)
        self._sock = bound(host, port)
        self.port: int = self._sock.getsockname()[1]
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._loop = asyncio.new_event_loop()
        self._pump: _Pump | None = None
        self._thread = threading.Thread(target=self._run, name="safari-net", daemon=True)
        started = threading.Event()
        self._loop.call_soon(started.set)
        self._loop.call_soon(self._begin)
        self._thread.start()
        started.wait()

    def __enter__(self) -> ServerSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def counts(self) -> Counts:
        """Received datagrams: accepted, and dropped by reason."""
        with self._lock:
            return Counts(self._core.counts.accepted, dict(self._core.counts.dropped))

    def open(self, session: Session, source: Source, most_bytes: int, pacing: Pacing | None = None) -> None:
        """Begin a session; see `Server.open`."""
        with self._lock:
            self._core.open(session, source, clock(), most_bytes, pacing)

    def wait(
        self, sessions: Sequence[bytes], deadline: float, stop: Callable[[], bool] | None = None
    ) -> None:
        """Wait until all these uploads are complete, `clock()` reaches the deadline, or `stop()` is true."""
        with self._changed:
            while clock() < deadline and not all(map(self._core.complete, sessions)):
                if stop is not None and stop():
                    return
                self._changed.wait(min(0.1, max(deadline - clock(), 0)))

    def settle(self, sessions: Sequence[bytes], deadline: float) -> None:
        """Wait until these uploads are complete or silent, or `clock()` reaches the deadline.

        Silent: nothing was received for a round trip (a second if it was not measured) plus 0.3 seconds.
        """
        start = clock()
        while (now := clock()) < deadline:
            with self._lock:
                found = [self._core.look(session) for session in sessions]
            quiet = [
                _LAST_MOMENT + (u.round_trip if u.round_trip < math.inf else _UNKNOWN_TRIP) for u in found
            ]
            if all(
                u.complete or now - max(u.heard_at, start) > wait
                for u, wait in zip(found, quiet, strict=True)
            ):
                return
            time.sleep(min(_LOOK, max(deadline - now, 0)))

    def complete(self, session: bytes) -> bool:
        """Whether every packet of an open session was received."""
        with self._lock:
            return self._core.complete(session)

    def look(self, session: bytes) -> Upload:
        """The upload of an open session so far."""
        with self._lock:
            return self._core.look(session)

    def close(self, session: bytes) -> Upload:
        """End a session and return its upload."""
        with self._lock:
            return self._core.close(session)

    def stop(self) -> None:
        """End the thread and free the port."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._sock.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _begin(self) -> None:
        async def pump() -> None:
            self._pump = _Pump(self._sock, self._core, self._received, self._polled, self._sock.sendto)

        self._task = self._loop.create_task(pump())

    def _received(self, data: bytes, address: Any, now: float) -> None:
        with self._changed:
            before = self._core.completed
            self._core.receive(data, address, now)
            if self._core.completed != before:
                self._changed.notify_all()

    def _polled(self, now: float) -> list[tuple[bytes, Any]]:
        with self._lock:
            return self._core.poll(now)


@dataclass(frozen=True)
class Sending:
    """The client's view of an upload; it does not learn what arrived."""

    packets: int
    unsent: int
    bytes_sent: int
    rate: float


class ClientSocket:
    """A client's end of one round. Use it in a `with` statement; inside, `receive` and then `upload`.

    Args:
        offer: From the control channel.
        rng: See `Client`.
        pacing: How fast to send; the offer's rate unless given.
        rate: A rate that an earlier round has learned.
    """

    def __init__(
        self,
        offer: Offer,
        *,
        rng: np.random.Generator,
        pacing: Pacing | None = None,
        rate: float | None = None,
    ):
        self._sock = _connected(offer.host, offer.port)
        now = clock()
        self._core = Client(
            offer.open(),
            offer.shape,
            now=now,
            deadline=now + offer.deadline,
            epoch=epoch(),
            rng=rng,
            pacing=pacing or Pacing(rate=offer.rate),
            rate=rate,
        )

    def __enter__(self) -> ClientSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    @property
    def counts(self) -> Counts:
        """Received datagrams: accepted, and dropped by reason."""
        return self._core.counts

    @property
    def received(self) -> int:
        """Number of received symbols of the broadcast."""
        return self._core.received

    async def receive_async(self) -> bytes | Expired:
        """The broadcast, or what there was of it at the deadline."""
        event = await self._until(Ready, Expired)
        return event.message if isinstance(event, Ready) else event

    async def upload_async(self, packets: Sequence[bytes]) -> Sending:
        """Send these packets at the pace, until all are sent or the deadline has passed."""
        self._core.upload(packets, clock())
        event = await self._until(Sent, Expired)
        unsent = event.unsent if isinstance(event, Expired) else 0
        channel = self._core.channel
        return Sending(len(packets), unsent, channel.bytes_sent, channel.pacer.learned())

    def receive(self) -> bytes | Expired:
        """`receive_async` for callers without an event loop."""
        return asyncio.run(self.receive_async())

    def upload(self, packets: Sequence[bytes]) -> Sending:
        """`upload_async` likewise."""
        return asyncio.run(self.upload_async(packets))

    async def _until(self, *kinds: type) -> Any:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def look() -> None:
            while (event := self._core.next_event()) is not None:
                if isinstance(event, kinds) and not done.done():
                    done.set_result(event)

        pump = _Pump(
            self._sock,
            self._core,
            lambda data, _, now: self._core.receive(data, now),
            lambda now: [(data, None) for data in self._core.poll(now)],
            lambda data, _: self._sock.send(data),
            look,
        )
        try:
            return await done
        finally:
            pump.stop()


class Relay:
    """A relay between clients and a server that loses and delays datagrams. For trials and tests.

    Clients send to its `port` (0: any free one); each of them gets a socket of its own towards the server, as
    behind a NAT. Use it in an `async with` statement.
    """

    def __init__(
        self,
        host: str,
        server: tuple[str, int],
        up: Conditions,
        down: Conditions,
        seed: int = 0,
        port: int = 0,
    ):
        self._host, self._server, self._conditions, self._seed = host, server, (up, down), seed
        self._sock = bound(host, port)
        self.port: int = self._sock.getsockname()[1]
        self._ways: dict[Any, tuple[socket.socket, Path, Path]] = {}
        self._timers: dict[Path, asyncio.TimerHandle] = {}

    async def __aenter__(self) -> Relay:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._sock.fileno(), self._from_clients)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop.remove_reader(self._sock.fileno())
        for way in self._ways.values():
            self._loop.remove_reader(way[0].fileno())
            way[0].close()
        for timer in self._timers.values():
            timer.cancel()
        self._sock.close()

    @property
    def lost(self) -> tuple[float, float]:
        """The shares of what was offered that were lost, up and down."""
        ups, downs = [w[1] for w in self._ways.values()], [w[2] for w in self._ways.values()]
        shares = [sum(p.lost for p in ps) / max(1, sum(p.offered for p in ps)) for ps in (ups, downs)]
        return shares[0], shares[1]

    def _way(self, address: Any) -> tuple[socket.socket, Path, Path]:
        if address not in self._ways:
            sock = _connected(*self._server)
            number = len(self._ways)
            up, down = (
                Path(c, np.random.default_rng([self._seed, number, k]))
                for k, c in enumerate(self._conditions)
            )
            self._ways[address] = sock, up, down
            self._loop.add_reader(sock.fileno(), self._from_server, address)
        return self._ways[address]

    def _from_clients(self) -> None:
        for data, address in _waiting(self._sock):
            sock, up, _ = self._way(address)
            up.send(data, clock())
            self._deliver(up, sock.send)

    def _from_server(self, address: Any) -> None:
        sock, _, down = self._ways[address]
        for data, _ in _waiting(sock):
            down.send(data, clock())
            self._deliver(down, lambda d: self._sock.sendto(d, address))

    def _deliver(self, path: Path, send: Callable[[bytes], Any]) -> None:
        for data, _ in path.due(clock()):
            with contextlib.suppress(OSError):
                send(data)
        at = path.next_time()
        if path in self._timers:
            self._timers.pop(path).cancel()
        if at is not None:
            self._timers[path] = self._loop.call_later(max(at - clock(), 0), self._deliver, path, send)


def _waiting(sock: socket.socket) -> list[tuple[bytes, Any]]:
    out: list[tuple[bytes, Any]] = []
    with contextlib.suppress(OSError):
        while len(out) < _AT_ONCE:
            out.append(sock.recvfrom(65535))
    return out


def bound(host: str, port: int) -> socket.socket:
    """A socket that receives datagrams; SafariError where it cannot be had."""
    return _attached(socket.socket.bind, host, port, socket.AI_PASSIVE, "receive datagrams at")


def _connected(host: str, port: int) -> socket.socket:
    return _attached(socket.socket.connect, host, port, 0, "send datagrams to")


def _attached(
    attach: Callable[[socket.socket, Any], None], host: str, port: int, flags: int, purpose: str
) -> socket.socket:
    """A socket that is bound or connected; `purpose` is for the message where that fails."""
    family, address = _resolve(host, port, flags)
    sock = _udp(family)
    try:
        attach(sock, address)
    except OSError as error:
        sock.close()
        raise SafariError(f"cannot {purpose} {host} port {port}: {error.strerror}") from error
    return sock


def _resolve(host: str, port: int, flags: int) -> tuple[socket.AddressFamily, Any]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=flags)
    except OSError as error:
        raise SafariError(f"host {host!r} must be a name or an address that can be found: {error}") from error
    return found[0][0], found[0][4]


def _udp(family: socket.AddressFamily) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_DGRAM)
    sock.setblocking(False)
    for option, force in _FORCE.items():
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        with contextlib.suppress(OSError):
            if sys.platform == "linux":
                sock.setsockopt(socket.SOL_SOCKET, force, _BUFFER)
    return sock
