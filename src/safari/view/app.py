"""The page as a web application: a few fixed addresses, an event stream, and access control."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from safari.errors import RunError, SafariError
from safari.view.limits import vouch
from safari.view.monitor import Cursors, Monitor
from safari.view.page import FILES, HEADERS, live_page, read_file

Endpoint = Callable[[Request], Awaitable[Response]]

# Seconds between two looks at the disk, and between two signs of life to a page that has no news.
EVERY = 0.5
ALIVE = 15.0
COOKIE = "safari-view"
# Event streams at the same time: one for each page that is open.
MOST_STREAMS = 64


def build_app(monitor: Monitor, token: str | None, hosts: frozenset[str] | None) -> Starlette:
    """The application; `safari.view.server.build` documents its parameters."""
    access, feed = Access(token, hosts), EventFeed(monitor)
    endpoints = Endpoints(monitor, feed)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(feed.watch())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    routes = {
        "/": endpoints.page,
        "/static/{name}": endpoints.file,
        "/api/events": endpoints.events,
        "/api/detail": endpoints.detail,
        "/api/similarity": endpoints.similarity,
    }
    guarded = [Route(path, access.guarded(endpoint)) for path, endpoint in routes.items()]
    return Starlette(routes=guarded, lifespan=lifespan)


def check_token(token: str | None) -> None:
    """SafariError for a token that would let everybody in, or that no address can carry."""
    if token is not None and not (token.strip() and token.isprintable()):
        raise SafariError(f"token must be printable and not empty, got {token!r}")


class Access:
    """Access control by token and host name.

    token: a secret that a request must carry, in its address or in the cookie of an earlier answer.
    hosts: the names this server answers to; None: any.
    """

    def __init__(self, token: str | None, hosts: frozenset[str] | None):
        check_token(token)
        self._token, self._hosts = token, hosts
        # A digest: a cookie cannot hold every character that a token may have.
        self._cookie = "" if token is None else hashlib.sha256(token.encode()).hexdigest()

    def guarded(self, endpoint: Endpoint) -> Endpoint:
        """Wrap an endpoint so that it refuses requests without access."""

        async def guard(request: Request) -> Response:
            response = self._refuse(request) or await endpoint(request)
            for name, value in HEADERS.items():
                response.headers[name] = value
            return response

        return guard

    def _refuse(self, request: Request) -> Response | None:
        # A name that leads here by way of somebody else's DNS must not read the runs (rebinding).
        if self._hosts is not None and host_of(request.headers.get("host", "")) not in self._hosts:
            return PlainTextResponse("this page answers to its own address only\n", 403)
        if self._token is None:
            return None
        if _same(request.cookies.get(COOKIE, ""), self._cookie):
            vouch(request.scope)
            return None
        if not _same(request.query_params.get("token", ""), self._token):
            return PlainTextResponse("a token is needed: use the address that safari view printed\n", 403)
        vouch(request.scope)
        # Out of the address, so that it is not copied along with a link or left in a history.
        response = RedirectResponse("/", 303)
        response.set_cookie(COOKIE, self._cookie, httponly=True, samesite="strict")
        return response


class Endpoints:
    """Handlers of the page, its files, and its data."""

    def __init__(self, monitor: Monitor, feed: EventFeed):
        self._monitor, self._feed = monitor, feed

    async def page(self, request: Request) -> Response:
        """The page itself."""
        return Response(live_page(), media_type="text/html; charset=utf-8")

    async def file(self, request: Request) -> Response:
        """A script or style of the page."""
        name = request.path_params["name"]
        if name not in FILES:
            return PlainTextResponse("not found\n", 404)
        return Response(read_file(name), media_type=FILES[name])

    async def detail(self, request: Request) -> Response:
        """Every client and layer of a trial."""
        return await _json(self._monitor.detail, request.query_params.get("trial", ""))

    async def similarity(self, request: Request) -> Response:
        """The similarity matrix of a trial after a round."""
        text = request.query_params.get("round", "")
        round = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
        return await _json(self._monitor.snapshot, request.query_params.get("trial", ""), round)

    async def events(self, request: Request) -> Response:
        """Stream of events with new data."""
        if self._feed.streams >= MOST_STREAMS:
            return PlainTextResponse("too many pages are open\n", 503)
        return StreamingResponse(self._feed.stream(), media_type="text/event-stream")


class EventFeed:
    """One look at the disk for all pages; each page gets what it lacks, as fast as it can take it."""

    def __init__(self, monitor: Monitor):
        self._monitor = monitor
        self._changed = asyncio.Condition()
        self.streams = 0

    async def watch(self) -> None:
        """Poll the disk until cancelled, without a pause while there is more to read."""
        state: Any = None
        while True:
            changed = await asyncio.to_thread(self._monitor.poll)
            now = await asyncio.to_thread(self._monitor.describe)
            if changed or now != state:
                state = now
                self._monitor.version += not changed
                async with self._changed:
                    self._changed.notify_all()
            if not changed:
                await asyncio.sleep(EVERY)

    async def stream(self) -> AsyncIterator[str]:
        """Events so far, then each new one as it happens."""
        self.streams += 1
        try:
            async for event in self._events():
                yield event
        finally:
            self.streams -= 1

    async def _events(self) -> AsyncIterator[str]:
        have: Cursors = {}
        told: dict[str, Any] | None = None
        while True:
            version = self._monitor.version
            about = await asyncio.to_thread(self._monitor.describe)
            trials, have = await asyncio.to_thread(self._monitor.since, have)
            if about != told:
                yield _event("runs", about)
            if trials:
                yield _event("trials", trials)
            if trials or about != told:
                yield _event("table", await asyncio.to_thread(self._monitor.table))
            told = about
            async with self._changed:
                while self._monitor.version == version:
                    try:
                        await asyncio.wait_for(self._changed.wait(), ALIVE)
                    except TimeoutError:
                        break
            if self._monitor.version == version:
                yield ": still here\n\n"


async def _json(make: Callable[..., Any], *arguments: Any) -> Response:
    try:
        found = await asyncio.to_thread(make, *arguments)
    except RunError as error:
        return PlainTextResponse(f"{error}\n", 404)
    # In ASCII: names in a run's records may hold halves of characters, which JSON can and UTF-8 cannot.
    return Response(json.dumps(found, allow_nan=False), media_type="application/json")


def _event(kind: str, value: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(value, allow_nan=False)}\n\n"


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def host_of(header: str) -> str:
    """The host of a Host header, without its port.

    >>> host_of("localhost:8100"), host_of("[::1]:8100"), host_of("127.0.0.1")
    ('localhost', '::1', '127.0.0.1')
    """
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()
