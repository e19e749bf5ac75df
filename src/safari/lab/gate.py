"""The gate: what of a SuperLink is reachable from outside.

A SuperLink has all its APIs on one port: Fleet, for SuperNodes; Control, with which `flwr run` submits apps, that is
code which then runs on the server and on its clients; Runtime, for the apps. It asks for accounts at none of them
(Flower 1.41, without its enterprise edition), and has no option to put them on different addresses. So the SuperLink
listens on the loopback address, and this reverse proxy alone on the others. It terminates TLS, parses each request, and
passes on the Fleet calls by name and nothing else; the request that reaches the SuperLink is a new one, so that no
trick with paths or lengths is carried over.

With invitations it also takes in clients (`safari.lab.invitations`) and lets nobody else make calls; it can be told
which apps to give out, and then gives out no others. It is a process of its own (`safari net gate`), so that a flood of
connections takes descriptors and memory from nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from flwr.proto.control_pb2 import RegisterNodeRequest
from flwr.proto.fab_pb2 import GetFabResponse
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from safari.errors import SafariError, brief
from safari.lab.fields import MalformedError, count_fields
from safari.lab.invitations import Invitations, JoinError, app_digest
from safari.net.certificates import Certificates
from safari.text import visible
from safari.view.limits import Limits, Reporter, vouch
from safari.view.server import PageServer, listen

# What a SuperNode with a registered key calls. Registering by itself is not among it.
FLEET_CALLS = frozenset(
    {
        "activate-node",
        "confirm-message-received",
        "deactivate-node",
        "get-fab",
        "get-run",
        "pull-messages",
        "pull-object",
        "push-messages",
        "push-object",
        "send-node-heartbeat",
    }
)
JOIN = "/safari/join"
_KEY, _TIMESTAMP = "flwr-public-key", "flwr-timestamp"
# Seconds that a SuperNode's clock may be ahead of the SuperLink's, and behind: Flower's own limits.
_AHEAD, _BEHIND = 5, 305
_TO_SUPERLINK = (
    "accept",
    "content-type",
    _KEY,
    "flwr-signature",
    _TIMESTAMP,
    "flwr-component-name",
    "flwr-package-name",
    "flwr-package-version",
)
_TO_CLIENT = ("content-type", "flwr-version-incompatibility-message")
# Flower cuts what it sends into pieces; this is above each of them.
LARGEST_CALL, LARGEST_JOIN = 64 * 2**20, 4096
# The bodies of all requests under way together; a SuperNode that is refused for this asks again.
LARGEST_SUM = 8 * LARGEST_CALL
# Requests at a time, and bytes of each, of strangers: those to join and, without invitations, those with a key that the
# SuperLink has not accepted so far. They must not take the places of the others.
STRANGERS, LARGEST_OF_STRANGER = 16, 2**20
# Keys that are remembered, and characters of each (one on P-384 has 288). Beyond them a key stays unknown.
MOST_KEYS, LONGEST_KEY = 100_000, 512
# Fields of a request, those in its messages included: a reply of 5,000 tensors has fewer, and strangers send few.
# Whoever parses makes an object of each, here and in the SuperLink, before anything is known of the signature.
MOST_FIELDS, MOST_OF_STRANGER = 20_000, 2000
# For a whole body to come in, and for the SuperLink to answer; a SuperNode waits for 30.
_SECONDS, _STRANGER_SECONDS = 30.0, 5.0
# Bytes of a body that are checked in the event loop: some milliseconds.
_AT_ONCE = 2**12
# Descriptors: for the process itself and whoever else connects, and for each client.
_DESCRIPTORS, _EACH = 512, 16


class Gate:
    """The application; `serve` puts it on a port.

    Args:
        superlink: host:port of the SuperLink, on loopback.
        authority: The certificate of the authority that signed the SuperLink's.
        invitations: Who may join; None: the SuperLink alone decides.
        apps: The SHA-256 of each app (FAB) that clients may have; None: any.
        report: Where refusals are written, each kind at most once a minute.
    """

    def __init__(
        self,
        superlink: str,
        authority: Path,
        invitations: Invitations | None = None,
        apps: frozenset[str] | None = None,
        report: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ):
        try:
            verify = ssl.create_default_context(cafile=str(authority))
        except OSError as error:
            raise SafariError(f"{authority} must be a certificate: {error}") from error
        self._to: dict[str, Any] = {
            "base_url": f"https://{superlink}",
            "verify": verify,
            "timeout": _SECONDS,
            # Requests to this machine do not go through a proxy that the environment names.
            "trust_env": False,
        }
        self._invitations, self._apps, self.report = invitations, apps, Reporter(report)
        self.write = report
        self._keys: set[str] = set()
        # Bytes of bodies, and requests of strangers, that are under way; and how many of these may be.
        self._held, self._here, self.strangers = 0, 0, STRANGERS
        self._client: httpx.AsyncClient
        routes = [Route("/v1/fleet/{call}", self._pass_on, methods=["POST"])]
        if invitations is not None:
            routes.append(Route(JOIN, self._join, methods=["POST"]))
        self.app = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={HTTPException: self._refuse},
        )
        self.app.router.redirect_slashes = False

    def register_known(self) -> None:
        """Tell a SuperLink that has just started of those that have joined before."""
        if self._invitations is None:
            return
        with httpx.Client(**self._to) as client:
            for key in self._invitations.keys().values():
                try:
                    answer = client.post("/v1/control/register-node", **_registration(key))
                except httpx.HTTPError as error:
                    raise SafariError(f"the SuperLink must register a client's key: {error}") from error
                if answer.is_error:
                    raise SafariError(
                        f"the SuperLink must register a client's key; it says {visible(answer.text)}"
                    )
                self._keys.add(_header(key))

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with httpx.AsyncClient(**self._to) as self._client:
            yield

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """Refuse what is not a Fleet call, or comes without a key that has joined; nothing of it is passed on."""
        assert isinstance(error, HTTPException)
        peer = request.client.host if request.client else "?"
        what = visible(f"{request.method} {request.scope['path']}", 100)
        self.report(str(error.status_code), f"refused {what} from {visible(peer)}: {visible(error.detail)}")
        return _told(error.status_code, error.detail)

    async def _pass_on(self, request: Request) -> Response:
        call = request.path_params["call"]
        if call not in FLEET_CALLS:
            raise HTTPException(404, "no Fleet call for SuperNodes with keys")
        key = request.headers.get(_KEY, "")
        if self._invitations is not None and key not in self._keys:
            # Before the body is read. The SuperLink finds out whether the caller also has the private key.
            # A SuperNode that gets 401 ends without saying why; at its first call it has to.
            raise HTTPException(
                400 if call == "activate-node" else 401, "no key that has joined with an invitation"
            )
        # As bytes: a header may hold some that are no ASCII.
        headers = {
            name.encode(): request.headers[name].encode("latin-1")
            for name in _TO_SUPERLINK
            if name in request.headers
        }
        async with self._body_of(key, request) as body:
            most = MOST_FIELDS if key in self._keys else MOST_OF_STRANGER
            check = partial(_check, call, body, most)
            # Not where other calls wait, unless it is over at once.
            await asyncio.to_thread(check) if len(body) > _AT_ONCE else check()
            try:
                answer = await self._client.post(f"/v1/fleet/{call}", content=body, headers=headers)
            except httpx.HTTPError as error:
                raise HTTPException(502, f"the SuperLink does not answer: {type(error).__name__}") from error
        if answer.status_code == 401 and (wrong := _wrong_clock(request.headers.get(_TIMESTAMP, ""))):
            # A line of its own: of all others that are refused with the same status, one a minute is reported.
            self.report("clock", f"{visible(request.client.host if request.client else '?')}: {wrong}")
            raise HTTPException(400 if call == "activate-node" else 401, wrong)
        if 0 < len(key) <= LONGEST_KEY and answer.is_success:
            # The SuperLink has found that the key is registered, and signed with. One that asks for no keys says
            # so to everybody: then what is remembered must have an end.
            vouch(request.scope)
            if len(self._keys) < MOST_KEYS:
                self._keys.add(key)
        if call == "get-fab" and self._apps is not None and answer.is_success:
            found = app_digest(GetFabResponse.FromString(answer.content).fab.content)
            if found not in self._apps:
                # A SuperNode leaves out the messages of this run, and goes on.
                raise HTTPException(403, f"the app {found[:16]}… was not submitted by this server's command")
        kept = {name: answer.headers[name] for name in _TO_CLIENT if name in answer.headers}
        return Response(answer.content, answer.status_code, kept)

    async def _join(self, request: Request) -> Response:
        assert self._invitations is not None
        try:
            with self._place_for_stranger():
                async with self._body(request, LARGEST_JOIN, _STRANGER_SECONDS) as body:
                    client, clients, token, key = _read_join(body)
            if clients != self._invitations.clients:
                raise JoinError(f"clients must be {self._invitations.clients} here, got {brief(clients)}")
            # Nothing is awaited between looking at the keys and noting this one: a token admits one key.
            known = self._invitations.admit(client, token, key)
        except JoinError as error:
            raise HTTPException(403, str(error)) from error
        if _header(known) not in self._keys:
            try:
                answer = await self._client.post("/v1/control/register-node", **_registration(known))
            except httpx.HTTPError as error:
                raise HTTPException(502, f"the SuperLink does not answer: {type(error).__name__}") from error
            if answer.is_error:
                raise HTTPException(502, "the SuperLink did not register the key; its log says why")
            self._keys.add(_header(known))
        vouch(request.scope)
        return JSONResponse({})

    @contextlib.contextmanager
    def _place_for_stranger(self) -> Iterator[None]:
        if self._here >= self.strangers:
            raise HTTPException(503, "too many ask for the first time at once: try again in some seconds")
        self._here += 1
        try:
            yield
        finally:
            self._here -= 1

    @contextlib.asynccontextmanager
    async def _body_of(self, key: str, request: Request) -> AsyncIterator[bytes]:
        if key in self._keys:
            async with self._body(request, LARGEST_CALL, _SECONDS) as body:
                yield body
            return
        with self._place_for_stranger():
            try:
                async with self._body(request, LARGEST_OF_STRANGER, _STRANGER_SECONDS) as body:
                    yield body
            except HTTPException as error:
                # A device in the midst of a large push when the gate began anew: known with its next heartbeat.
                # 503 is what a SuperNode tries again after.
                if error.status_code in (408, 413):
                    raise HTTPException(503, f"at a first call {error.detail}: try again") from error
                raise

    @contextlib.asynccontextmanager
    async def _body(self, request: Request, largest: int, seconds: float) -> AsyncIterator[bytes]:
        """A request's body, counted among all that are held until it is let go."""
        pieces, size = [], 0
        try:
            try:
                async with asyncio.timeout(seconds):
                    async for piece in request.stream():
                        size += len(piece)
                        self._held += len(piece)
                        if size > largest:
                            raise HTTPException(413, f"a body must have at most {largest:,} bytes")
                        if self._held > LARGEST_SUM:
                            raise HTTPException(503, "too much is being sent at once: try again")
                        pieces.append(piece)
            except TimeoutError as error:
                raise HTTPException(408, f"a body must come within {seconds:g} s") from error
            except ClientDisconnect as error:
                # Nobody reads this answer, and it is no fault of ours.
                raise HTTPException(400, "the connection ended before the body did") from error
            yield b"".join(pieces)
        finally:
            self._held -= size


def serve(
    gate: Gate,
    host: str,
    port: int,
    certificates: Certificates,
    clients: int,
    opened: Callable[[], None],
) -> None:
    """Put the gate on a port, for about as many clients, until interrupted; `opened` is called when it is there.

    SafariError where the port is taken, or the certificate or its key cannot be used.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificates.server, certificates.key)
    except OSError as error:
        raise SafariError(
            f"{certificates.server} must be a certificate, and {certificates.key} its key: {error}"
        ) from error
    gate.strangers = STRANGERS + clients
    limits = limits_for(clients)
    with listen(host, port) as where:
        _bound_descriptors(_DESCRIPTORS + _EACH * clients)
        server = PageServer(
            gate.app,
            where,
            limits,
            # It reports each kind once a minute itself.
            lambda text: gate.write(visible(text)),
            certificate=certificates.server,
            key=certificates.key,
        )
        asyncio.run(server.run(opened))


def limits_for(clients: int) -> Limits:
    """The gate's limits with this many clients: with its connections to the SuperLink (100 at most) it holds fewer
    connections than `_bound_descriptors` allows, so that descriptors do not run out."""
    return Limits(
        silent=128 + 4 * clients, pending=64 + 8 * clients, active=32 + 4 * clients, request_seconds=60.0
    )


def _bound_descriptors(wanted: int) -> None:
    """Allow this many descriptors and no more: a connection takes up to 256 kB before it has shown what it is."""
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def ask_to_join(address: str, authority: Path, client: int, token: str, key: bytes, clients: int) -> None:
    """The client's side: have the server register a public key (PEM); SafariError where it refuses, or does not have
    that many clients."""
    body = {"client": client, "clients": clients, "token": token, "public-key": key.decode()}
    try:
        answer = httpx.post(
            f"https://{address}{JOIN}",
            json=body,
            verify=ssl.create_default_context(cafile=str(authority)),
            timeout=_SECONDS,
            trust_env=False,
        )
    except httpx.HTTPError as error:
        raise SafariError(f"{address} must take the invitation: {error or type(error).__name__}") from error
    if answer.is_error:
        try:
            told = answer.json()["detail"]
        except (ValueError, KeyError, TypeError):
            told = answer.text
        raise SafariError(f"{address} refuses the invitation: {visible(str(told))}")


def _wrong_clock(signed_at: str) -> str:
    """Error text for a SuperNode that signed at this time, now, if its clock is wrong; otherwise empty.

    The SuperLink refuses such a signature like any other that is invalid, and the SuperNode ends without a reason.
    """
    try:
        ahead = (datetime.fromisoformat(signed_at[:64]) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return ""
    if -_BEHIND < ahead < _AHEAD:
        return ""
    direction = "ahead of" if ahead > 0 else "behind"
    return (
        f"the device's clock is {abs(ahead):.0f} s {direction} the server's, and Flower accepts up to {_AHEAD} s "
        f"ahead and {_BEHIND} s behind: set the clock, by NTP for example"
    )


def _check(call: str, body: bytes, most: int) -> None:
    """Refuse a body that would be expensive to parse, and replies in the name of another node.

    The SuperLink checks whose key has signed for the request's node, and not that its replies are of that node.
    """
    kind: Any = PROTOBUF_REQUEST_TYPES["POST", f"/v1/fleet/{call}"]
    try:
        count_fields(body, kind.DESCRIPTOR, most)
    except MalformedError as error:
        # 503 is what a SuperNode tries again after: then it may be known.
        raise HTTPException(400 if most == MOST_FIELDS else 503, f"the body {error}") from error
    if call != "push-messages":
        return
    try:
        pushed = PushMessagesRequest.FromString(body)
    except DecodeError as error:
        raise HTTPException(400, "the body is no request to push messages") from error
    if any(reply.metadata.src_node_id != pushed.node.node_id for reply in pushed.messages_list):
        raise HTTPException(403, "a reply must be of the node that pushes it")


def _read_join(body: bytes) -> tuple[int, int, str, bytes]:
    try:
        table = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise JoinError("the request is not JSON") from error
    names = ("client", "clients", "token", "public-key")
    values = [table.get(name) for name in names] if isinstance(table, Mapping) else []
    match values:
        case [int() as client, int() as clients, str() as token, str() as key] if bool not in (
            type(client),
            type(clients),
        ):
            return client, clients, token, key.encode(errors="replace")
    raise JoinError(
        "the request must have a client's number, how many there are, its token and its public key"
    )


def _registration(key: bytes) -> dict[str, Any]:
    headers = {"content-type": "application/protobuf", "accept": "application/protobuf"}
    return {"content": RegisterNodeRequest(public_key=key).SerializeToString(), "headers": headers}


def _header(key: bytes) -> str:
    """A public key as it stands in a SuperNode's requests."""
    return b64encode(key).decode()


def _told(status: int, why: str) -> Response:
    # The form of Flower's own errors, which SuperNodes print.
    return JSONResponse({"code": status, "detail": why}, status)
