"""The page over HTTP: its listening socket, and a server with limits."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from safari.errors import MissingExtraError, SafariError
from safari.view.limits import DEFAULT_LIMITS, ConnectionLimiter, Limits, ListeningSocket, Reporter
from safari.view.monitor import Monitor

if TYPE_CHECKING:
    from starlette.applications import Starlette

USUAL_PORT = 8100
# Connections taken from the queue at a time: few, so that old ones are closed before descriptors run out.
ACCEPTED_AT_ONCE = 32
QUEUE = 512
# Seconds for a TLS handshake, and to say goodbye. asyncio has 60 and 30, for which a connection that says nothing would
# keep its descriptor.
HANDSHAKE, GOODBYE = 15.0, 5.0


def build(monitor: Monitor, token: str | None = None, hosts: frozenset[str] | None = None) -> Starlette:
    """The web application.

    Parameters
    ----------
    monitor: the runs it shows.
    token: a secret that every request needs; None: no request needs one.
    hosts: the names it answers to; None: any.
    """
    try:
        from safari.view.app import build_app
    except ImportError as error:
        raise _missing() from error
    return build_app(monitor, token, hosts)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int | None) -> socket.socket:
    """A socket to serve on; port None: the usual one, or any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    wanted = [USUAL_PORT, 0] if port is None else [port]
    for number in wanted:
        # With the protocol by name, asyncio turns Nagle's algorithm off, which costs 40 ms an answer.
        found = ListeningSocket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, number))
            found.listen(QUEUE)
        except OSError as error:
            found.close()
            if number == wanted[-1]:
                raise SafariError(
                    f"cannot serve on {host}, port {number}: {error.strerror or error}"
                ) from error
        else:
            return found
    raise SafariError(f"cannot serve on {host}")


def address_of(host: str, port: int, token: str | None) -> str:
    """The address to open in a browser.

    >>> address_of("127.0.0.1", 8100, None), address_of("::1", 80, "a&b #1")
    ('http://127.0.0.1:8100/', 'http://[::1]:80/?token=a%26b%20%231')
    """
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")


class PageServer:
    """A server for one application on one socket, until it is stopped.

    Parameters
    ----------
    app: the application (`build`).
    where: a socket that listens.
    limits: how many connections it carries, and how long each may take.
    report: where errors are written, a line each, every kind at most once a minute.
    certificate, key: files (PEM) for HTTPS; None: HTTP.
    """

    def __init__(
        self,
        app: Starlette,
        where: socket.socket,
        limits: Limits = DEFAULT_LIMITS,
        report: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
        *,
        certificate: Path | None = None,
        key: Path | None = None,
    ):
        try:
            import uvicorn
        except ImportError as error:
            raise _missing() from error
        self._where, self._report = where, Reporter(report)
        self._limiter = ConnectionLimiter(app, limits, self._report)
        if isinstance(where, ListeningSocket):
            where.accepted = self._limiter.accepted
        config = uvicorn.Config(
            self._limiter,
            http=self._limiter.protocol(),
            ws="none",
            loop="asyncio",
            lifespan="on",
            backlog=ACCEPTED_AT_ONCE,
            # Everything worth a line is reported by the limiter and the loop's handler, without a flood.
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            # The limiter finds a connection by its peer: no header may name another.
            proxy_headers=False,
            # Pages hold their stream open for good: do not wait for them when stopped.
            timeout_graceful_shutdown=1,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        self._server, self._has_tls = uvicorn.Server(config), certificate is not None

    async def run(self, opened: Callable[[], None]) -> None:
        """Serve; `opened` is called once the page can be asked for."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._loop_error)
        if self._has_tls:
            # uvicorn has no option for these.
            limited = partial(
                loop.create_server, ssl_handshake_timeout=HANDSHAKE, ssl_shutdown_timeout=GOODBYE
            )
            loop.create_server = limited  # type: ignore[method-assign]
        sweeping = asyncio.create_task(self._limiter.sweep())
        serving = asyncio.create_task(self._server.serve(sockets=[self._where]))
        try:
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.02)
            if self._server.started:
                # uvicorn has set the queue to the number that it takes at a time.
                self._where.listen(QUEUE)
                opened()
            await serving
        finally:
            sweeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sweeping

    def stop(self) -> None:
        """End `run`; may be called from any thread."""
        self._server.should_exit = True

    def _loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        kind = type(error).__name__ if error is not None else str(context.get("message"))
        self._report(kind, f"{context.get('message')}: {kind}: {error}")


def serve(app: Starlette, where: socket.socket, opened: Callable[[], None]) -> None:
    """Serve until interrupted; `opened` is called once the page can be asked for."""
    asyncio.run(PageServer(app, where).run(opened))


def _missing() -> MissingExtraError:
    return MissingExtraError("starlette and uvicorn", "view", "live pages")
