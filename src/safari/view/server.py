"""The page over HTTP: a few fixed addresses, events as they happen, and nobody else let in."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from safari.errors import MissingExtraError, RunError, SafariError
from safari.view.hub import Cursors, Hub
from safari.view.page import FILES, HEADERS, live_page, read_file

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

# Seconds between two looks at the disk, and between two signs of life to a page that has no news.
EVERY = 0.5
ALIVE = 15.0
COOKIE = "safari-view"


def build(hub: Hub, token: str | None = None, hosts: frozenset[str] | None = None) -> Starlette:  # noqa: C901
    """The application. `token`: whoever lacks it is refused. `hosts`: the names it answers to; None: all."""
    try:
        from starlette.applications import Starlette
        from starlette.responses import (
            JSONResponse,
            PlainTextResponse,
            RedirectResponse,
            Response,
            StreamingResponse,
        )
        from starlette.routing import Route
    except ImportError as error:
        raise MissingExtraError("starlette and uvicorn", "view", "live pages") from error

    news = News(hub)

    def guarded(
        answer: Callable[[Request], Awaitable[Response]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guard(request: Request) -> Response:
            response = _refuse(request) or await answer(request)
            for name, value in HEADERS.items():
                response.headers[name] = value
            return response

        return guard

    def _refuse(request: Request) -> Response | None:
        # A name that leads here by way of somebody else's DNS must not read the runs (rebinding).
        if hosts is not None and _host(request.headers.get("host", "")) not in hosts:
            return PlainTextResponse("this page answers to its own address only\n", 403)
        if token is None or _same(request.cookies.get(COOKIE, ""), token):
            return None
        if not _same(request.query_params.get("token", ""), token):
            return PlainTextResponse("a token is needed: use the address that safari view printed\n", 403)
        # Out of the address, so that it is not copied along with a link or left in a history.
        response = RedirectResponse("/", 303)
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return response

    async def page(request: Request) -> Response:
        return Response(live_page(), media_type="text/html; charset=utf-8")

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in FILES:
            return PlainTextResponse("not found\n", 404)
        return Response(read_file(name), media_type=FILES[name])

    async def detail(request: Request) -> Response:
        return await _json(hub.detail, request.query_params.get("trial", ""))

    async def picture(request: Request) -> Response:
        text = request.query_params.get("round", "")
        round = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
        return await _json(hub.picture, request.query_params.get("trial", ""), round)

    async def _json(make: Callable[..., Any], *arguments: Any) -> Response:
        try:
            return JSONResponse(await asyncio.to_thread(make, *arguments))
        except RunError as error:
            return PlainTextResponse(f"{error}\n", 404)

    async def events(request: Request) -> Response:
        return StreamingResponse(news.stream(), media_type="text/event-stream")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(news.watch())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    paths = {"/": page, "/static/{name}": file, "/api/events": events}
    paths |= {"/api/detail": detail, "/api/similarity": picture}
    routes = [Route(path, guarded(answer)) for path, answer in paths.items()]
    return Starlette(routes=routes, lifespan=lifespan)


class News:
    """One look at the disk for all pages; each page gets what it lacks, as fast as it can take it."""

    def __init__(self, hub: Hub):
        self._hub = hub
        self._changed = asyncio.Condition()

    async def watch(self) -> None:
        """Look again and again; at once while there is more to read."""
        state: Any = None
        while True:
            changed = await asyncio.to_thread(self._hub.poll)
            now = await asyncio.to_thread(self._hub.describe)
            if changed or now != state:
                state = now
                self._hub.version += not changed
                async with self._changed:
                    self._changed.notify_all()
            if not changed:
                await asyncio.sleep(EVERY)

    async def stream(self) -> AsyncIterator[str]:
        """What happened so far, then whatever happens."""
        have: Cursors = {}
        told: dict[str, Any] | None = None
        while True:
            version = self._hub.version
            about = await asyncio.to_thread(self._hub.describe)
            trials, have = await asyncio.to_thread(self._hub.since, have)
            if about != told:
                yield _event("runs", about)
            if trials:
                yield _event("trials", trials)
            if trials or about != told:
                yield _event("table", await asyncio.to_thread(self._hub.table))
            told = about
            async with self._changed:
                while self._hub.version == version:
                    try:
                        await asyncio.wait_for(self._changed.wait(), ALIVE)
                    except TimeoutError:
                        break
            if self._hub.version == version:
                yield ": still here\n\n"


def _event(kind: str, value: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(value, allow_nan=False)}\n\n"


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def _host(header: str) -> str:
    """The host of a Host header, without its port.

    >>> _host("localhost:8100"), _host("[::1]:8100"), _host("127.0.0.1")
    ('localhost', '::1', '127.0.0.1')
    """
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


def is_loopback(host: str) -> bool:
    """Can only this machine reach it?

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
    wanted = [8100, 0] if port is None else [port]
    for number in wanted:
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, number))
            found.listen(128)
        except OSError as error:
            found.close()
            if number == wanted[-1]:
                raise SafariError(
                    f"cannot serve on {host}, port {number}: {error.strerror or error}"
                ) from error
        else:
            return found
    raise SafariError(f"cannot serve on {host}")


def serve(app: Starlette, where: socket.socket, opened: Callable[[], None]) -> None:
    """Serve until stopped; `opened` is called once the page can be asked for."""
    try:
        import uvicorn
    except ImportError as error:
        raise MissingExtraError("starlette and uvicorn", "view", "live pages") from error

    # Pages hold their stream open for good: do not wait for them when stopped.
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, server_header=False
    )
    server = uvicorn.Server(config)

    async def run() -> None:
        serving = asyncio.create_task(server.serve(sockets=[where]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.02)
        if server.started:
            opened()
        await serving

    asyncio.run(run())
