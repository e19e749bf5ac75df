"""Limits on connections, so that a flood of half-open requests cannot make the page unreachable.

uvicorn waits for ever for the rest of a request, and accepts connections until the process has no file
descriptors left. Here a connection that has not sent a whole request within some seconds is closed; when too
many are pending, the oldest one of the address that has most of them is closed. A flood from one machine displaces its
own connections and nobody else's, and whoever sends a request at once is always served.

With TLS, asyncio announces a connection only after its handshake. Connections that never get that far are therefore
counted where they are accepted (`ListeningSocket`), under the same rule.

A flood from many addresses has few connections at each. So addresses from which a request came that the application
vouches for (`vouch`) give way last, a few connections each: whoever takes part already is not displaced by strangers,
however many. TCP has shown that the addresses are real, as a stateless cookie (QUIC's Retry) shows it for datagrams;
what newcomers are left with is that a quick handshake ends before the oldest is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]
Peer = tuple[Any, ...]

SWEEP_EVERY = 1.0
REPORT_EVERY = 60.0
# Addresses that are remembered because they were vouched for, and the waiting connections of each that give way last:
# behind one address there may be several clients, and somebody else.
MOST_KNOWN, KNOWN_EACH = 65_536, 8
_VOUCH = "safari.vouch"


@dataclass(frozen=True)
class Limits:
    """Limits of one server on connections and requests.

    silent: connections that have not finished their TLS handshake; beyond this number the oldest one of the address
        with most of them is closed.
    pending: connections without a whole request; beyond this number likewise.
    active: requests that are being answered; beyond this number the answer is 503.
    request_seconds: how long a client may take to send a request.
    send_seconds: how long a client may take before it accepts more of an answer.
    """

    silent: int = 64
    pending: int = 64
    active: int = 128
    request_seconds: float = 10.0
    send_seconds: float = 30.0


DEFAULT_LIMITS = Limits()


class Reporter:
    """Passes messages on, each kind at most once a minute: whoever causes errors must not fill a terminal."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._write, self._clock = write, clock
        self._last: dict[str, float] = {}

    def __call__(self, kind: str, text: str) -> None:
        """Write `text`, unless something of the same `kind` was written within the last minute."""
        now = self._clock()
        if now - self._last.get(kind, -REPORT_EVERY) >= REPORT_EVERY:
            self._last[kind] = now
            self._write(f"{text} (reported at most once a minute)")


class ListeningSocket(socket.socket):
    """A socket that calls `accepted` for each connection as it is accepted, before any handshake."""

    accepted: Callable[[socket.socket, Any], None] | None = None

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; same contract as `socket.accept`."""
        found, address = super().accept()
        if self.accepted is not None:
            self.accepted(found, address)
        return found, address


class ConnectionLimiter:
    """An ASGI application around another, notified of connections by the protocol class it makes."""

    def __init__(self, app: Application, limits: Limits, report: Callable[[str, str], None]):
        self._app, self._limits, self._report = app, limits, report
        # In the order in which they were accepted, and began to wait: the oldest first.
        self._silent: dict[Peer, socket.socket] = {}
        self._pending: dict[Peer, tuple[asyncio.Transport, float]] = {}
        self._active: set[Peer] = set()
        # Addresses that were vouched for, the latest last.
        self._known: dict[str, None] = {}

    def protocol(self) -> type[asyncio.Protocol]:
        """uvicorn's HTTP protocol, which notifies this limiter when connections open and close.

        The one on h11, wherever httptools is installed or not: it bounds the size of a request's head.
        """
        from uvicorn.protocols.http.h11_impl import H11Protocol

        limiter = self

        class LimitedProtocol(H11Protocol):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                limiter.opened(transport)

            def connection_lost(self, exc: Exception | None) -> None:
                limiter.closed(self.transport)
                super().connection_lost(exc)

        return LimitedProtocol

    def accepted(self, connection: socket.socket, address: Any) -> None:
        """A connection was accepted; its handshake, if there is one, is to come."""
        self._silent[tuple(address[:2])] = connection
        if len(self._silent) <= self._limits.silent:
            return
        # asyncio has closed the sockets of those that failed.
        self._silent = {peer: found for peer, found in self._silent.items() if found.fileno() >= 0}
        if len(self._silent) > self._limits.silent:
            peer = self._gives_way(self._silent)
            oldest = self._silent.pop(peer)
            self._report("silent", f"too many connections say nothing: closing those from {_network(peer)}")
            # asyncio has the socket, and closes it when it reads the end.
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)

    def opened(self, transport: asyncio.Transport) -> None:
        """A connection can carry requests: its handshake is done."""
        self._silent.pop(_peer(transport), None)
        self._wait(_peer(transport), transport)
        if len(self._pending) > self._limits.pending:
            oldest, _ = self._pending.pop(self._gives_way(self._pending))
            oldest.abort()

    def closed(self, transport: asyncio.Transport) -> None:
        """A connection has ended."""
        peer = _peer(transport)
        if self._pending.get(peer, (None,))[0] is transport:
            del self._pending[peer]

    def vouched(self, peer: Peer) -> None:
        """The application has authenticated a request from this address."""
        network = _network(peer)
        self._known.pop(network, None)
        self._known[network] = None
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def _gives_way(self, waiting: Iterable[Peer]) -> Peer:
        """The oldest one of the address with most; a few of each address that was vouched for only after all others."""
        networks = {peer: _network(peer) for peer in waiting}
        counts = Counter(networks.values())
        strangers = {n: c for n, c in counts.items() if n not in self._known or c > KNOWN_EACH} or counts
        most = max(strangers, key=strangers.__getitem__)
        return next(peer for peer, network in networks.items() if network == most)

    async def sweep(self) -> None:
        """Close connections that have waited too long, periodically until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_EVERY)
            limit = time.monotonic() - self._limits.request_seconds
            for transport in [transport for transport, since in self._pending.values() if since < limit]:
                transport.abort()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, unless too many are active."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        peer = tuple(scope["client"] or ())
        transport, _ = self._pending.pop(peer, (None, 0.0))
        if transport is None:
            return
        if len(self._active) >= self._limits.active:
            await _refuse(send)
            self._wait(peer, transport)
            return
        self._active.add(peer)
        scope[_VOUCH] = partial(self.vouched, peer)
        try:
            await self._app(scope, receive, self._timed(send, transport))
        except Exception as error:
            kind = type(error).__name__
            self._report(f"request {kind}", f"a request failed: {kind}: {error}")
        finally:
            self._active.discard(peer)
            self._wait(peer, transport)

    def _wait(self, peer: Peer, transport: asyncio.Transport) -> None:
        """Start the time limit within which the connection has to send a whole request."""
        if not transport.is_closing():
            self._pending[peer] = transport, time.monotonic()

    def _timed(self, send: Send, transport: asyncio.Transport) -> Send:
        async def timed(message: Message) -> None:
            try:
                async with asyncio.timeout(self._limits.send_seconds):
                    await send(message)
            except TimeoutError:
                transport.abort()

        return timed


def _peer(transport: asyncio.BaseTransport) -> Peer:
    return tuple((transport.get_extra_info("peername") or ())[:2])


def vouch(scope: MutableMapping[str, Any]) -> None:
    """Say that this request is authenticated: its address gives way last when connections are too many."""
    found = scope.get(_VOUCH)
    if found is not None:
        found()


def _network(peer: Peer) -> str:
    """Network of one machine, which may use every address in it: an IPv4 address, or 64 bits of an IPv6 one.

    >>> _network(("10.0.0.7", 4711)), _network(("2001:db8::1:2", 4711)), _network(("::ffff:10.0.0.7", 4711))
    ('10.0.0.7', '2001:db8::/64', '10.0.0.7')
    """
    return _network_of(str(peer[0])) if peer else ""


@lru_cache(maxsize=65_536)
def _network_of(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if address.version == 4:
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped or ipaddress.ip_network((address, 64), strict=False))


async def _refuse(send: Send) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": b"too many requests at once: try again\n"})
