"""The gate in front of a real SuperLink: what an outsider tries at the address that clients reach, and what an invited
client can do there."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'safari-fl[flower]'")
pytest.importorskip("raptorq", reason="needs the extra net: pip install 'safari-fl[net]'")

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from flwr.cli.build import build_fab_from_disk
from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab, GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.message_pb2 import Message, Metadata
from flwr.proto.node_pb2 import Node
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, generate_key_pairs, public_key_to_bytes
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supernode import node_auth_http_interceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from processes import free_port, wait_until
from safari.errors import SafariError
from safari.lab.gate import _DESCRIPTORS, _EACH, FLEET_CALLS, Gate, ask_to_join, limits_for
from safari.lab.invitations import app_digest
from safari.lab.launch import Lab, superlink
from safari.net.certificates import make_certificates
from safari.view.limits import ConnectionLimiter, Limits, vouch
from safari.view.server import PageServer, listen

FLEET = "/v1/fleet/"


@dataclass(frozen=True)
class Served:
    """A SuperLink behind a gate."""

    lab: Lab

    @property
    def outside(self) -> str:
        return f"127.0.0.1:{self.lab.port}"

    @property
    def inside(self) -> str:
        return self.lab.control

    def control(self, address: str) -> ControlHttpClient:
        return ControlHttpClient.from_server_address(address, False, str(self.lab.certificates.authority), ())

    def fleet(self, address: str, private, public) -> FleetHttpClient:
        return FleetHttpClient.from_server_address(
            address,
            False,
            str(self.lab.certificates.authority),
            [NodeAuthHttpInterceptor(private, public)],
        )

    def join(self, client: int, key: bytes, token: str | None = None, clients: int = 4) -> None:
        token = self.lab.invitations.token(client) if token is None else token
        ask_to_join(self.outside, self.lab.certificates.authority, client, token, key, clients)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("lab")
    lab = Lab(folder, "127.0.0.1", free_port(), free_port(), {"clients": 4, "rounds": 1})
    lab.prepare()
    # In the place of the lab's own app, which would wait for clients.
    app(lab.app, "import time; time.sleep(300)")
    with superlink(lab) as check:
        yield Served(lab)
        # Both outlive all that is tried.
        check()


@pytest.fixture(scope="module")
def first_key(served) -> bytes:
    """The public key of client 0, which has joined."""
    _, public = generate_key_pairs()
    served.join(0, public_key_to_bytes(public))
    return public_key_to_bytes(public)


@contextlib.contextmanager
def refused(*statuses: int) -> Iterator[None]:
    with pytest.raises(httpx.HTTPStatusError) as found:
        yield
    assert found.value.response.status_code in statuses


def app(folder: Path, code: str = "raise SystemExit(1)") -> bytes:
    """An app whose code would run on the server and on its clients."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "harm.py").write_text(f"{code}\nserver = client = None\n")
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "harm"\nversion = "1.0.0"\nlicense = "Apache-2.0"\n[tool.flwr.app]\npublisher = "x"\n'
        '[tool.flwr.app.components]\nserverapp = "harm:server"\nclientapp = "harm:client"\n[tool.flwr.app.config]\n'
    )
    return build_fab_from_disk(folder)


def raw_answer(served: Served, head: str, body: bytes = b"") -> str:
    """The status line for a request that is sent as it stands."""
    context = ssl.create_default_context(cafile=served.lab.certificates.authority)
    with (
        socket.create_connection(("127.0.0.1", served.lab.port), 30) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as channel,
    ):
        channel.settimeout(30)
        channel.sendall(head.encode("latin-1") + b"\r\n\r\n" + body)
        return channel.recv(65536).split(b"\r\n")[0].decode()


def logged(served: Served, what: str) -> int:
    """How often the SuperLink's log of requests has something."""
    return (served.lab.folder / "superlink.log").read_text(errors="replace").count(what)


def test_an_app_is_submitted_on_loopback_and_refused_outside(served, tmp_path):
    request = StartRunRequest(fab=Fab(content=app(tmp_path / "harm")))
    with served.control(served.outside) as client, refused(404):
        client.StartRun(request)
    with served.control(served.outside) as client, refused(404):
        client.ListRuns(ListRunsRequest())
    with served.control(served.inside) as client:
        before = len(client.ListRuns(ListRunsRequest()).run_dict)
        assert client.StartRun(request).run_id
        assert len(client.ListRuns(ListRunsRequest()).run_dict) == before + 1
    assert "refused POST /v1/control/" in (served.lab.folder / "gate.log").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 on loopback")
def test_the_superlink_listens_on_one_loopback_address_and_the_gate_on_all(served):
    with socket.create_connection(("127.0.0.2", served.lab.port), 30):
        pass
    with socket.create_connection(("127.0.0.1", served.lab.control_port), 30):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", served.lab.control_port), 30)


def test_of_all_that_flower_answers_the_gate_passes_fleet_calls_alone(served):
    """With a newer Flower this says which calls have come or gone."""
    paths = {path for _, path in PROTOBUF_REQUEST_TYPES}
    fleet = {path.removeprefix(FLEET) for path in paths if path.startswith(FLEET)}
    assert fleet == FLEET_CALLS | {"register-node", "unregister-node"}
    others = {path for path in paths if path.removeprefix(FLEET) not in FLEET_CALLS}
    context = ssl.create_default_context(cafile=served.lab.certificates.authority)
    with httpx.Client(base_url=f"https://{served.outside}", verify=context, trust_env=False) as client:
        for path in sorted(others | {"/", "/docs", "/openapi.json", "/health", "/v1/fleet", "/v1/fleet/"}):
            for method in ("POST", "GET"):
                answer = client.request(method, path, headers={"content-type": "application/protobuf"})
                assert answer.status_code in (404, 405), (method, path)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/fleet/..%2fcontrol%2flist-runs",
        "/v1/fleet//../control/list-runs",
        "//v1/control/list-runs",
        "/v1/fleet/pull-messages/../../control/list-runs",
        "/v1/fleet/get-run%00/../../control/list-runs",
        "/v1/control/list-runs?x=/v1/fleet/get-run",
        "https://127.0.0.1/v1/control/list-runs",
    ],
)
def test_no_spelling_of_a_path_leads_to_the_control_api(served, path):
    before = logged(served, "/v1/control/")
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/protobuf\r\nContent-Length: 0"
    )
    assert raw_answer(served, head).split()[1] in ("400", "401", "404", "405")
    assert logged(served, "/v1/control/") == before


def test_no_second_request_is_smuggled_behind_the_first(served, first_key):
    key = b64encode(first_key).decode()
    hidden = (
        b"POST /v1/control/list-runs HTTP/1.1\r\nHost: x\r\n"
        b"Content-Type: application/protobuf\r\nContent-Length: 0\r\n\r\n"
    )
    before = logged(served, "/v1/control/list-runs")
    for lengths in (
        f"Content-Length: {len(hidden)}\r\nTransfer-Encoding: chunked",
        f"Transfer-Encoding: chunked\r\nContent-Length: {len(hidden)}",
        "Content-Length: 0\r\nContent-Length: 9",
        "Transfer-Encoding: chunked, identity",
    ):
        head = f"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nflwr-public-key: {key}\r\n{lengths}"
        assert raw_answer(served, head, b"0\r\n\r\n" + hidden).split()[1] in ("400", "401", "415", "501")
    assert logged(served, "/v1/control/list-runs") == before


def test_a_foreign_node_is_refused(served):
    private, public = generate_key_pairs()
    key = public_key_to_bytes(public)
    with served.fleet(served.outside, private, public) as client:
        with refused(404):
            client.RegisterNode(RegisterNodeFleetRequest(public_key=key))
        with refused(404):
            client.UnregisterNode(UnregisterNodeFleetRequest(node_id=1))
        with refused(400):
            client.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30))
        with refused(401):
            client.PullMessages(PullMessagesRequest(node=Node(node_id=1)))
    # Nor would the SuperLink have it.
    with served.fleet(served.inside, private, public) as client:
        with pytest.raises(httpx.HTTPStatusError):
            client.RegisterNode(RegisterNodeFleetRequest(public_key=key))
        with pytest.raises(httpx.HTTPStatusError):
            client.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30))


def test_a_token_admits_one_key_and_others_are_refused(served):
    (private, public), (_, other) = generate_key_pairs(), generate_key_pairs()
    key = public_key_to_bytes(public)
    for token in ("", "0" * 32, served.lab.invitations.token(2), "\u00e9" * 32):
        with pytest.raises(SafariError, match="the token is not that of client 1"):
            served.join(1, key, token)
    with served.fleet(served.outside, private, public) as client, refused(400):
        client.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30))

    served.join(1, key)
    # Once more, as after a restart of the client.
    served.join(1, key)
    with pytest.raises(SafariError, match="client 1 has joined with another key"):
        served.join(1, public_key_to_bytes(other))
    with pytest.raises(SafariError, match="client 1 has this key"):
        served.join(2, key)
    with pytest.raises(SafariError, match="client must lie between 0 and 3, got 4"):
        served.join(4, public_key_to_bytes(other))
    with pytest.raises(SafariError, match="refuses the invitation: clients must be 4 here, got 3"):
        served.join(2, public_key_to_bytes(other), clients=3)
    with served.fleet(served.outside, private, public) as client:
        node = client.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30)).node_id
        assert node
        client.PullMessages(PullMessagesRequest(node=Node(node_id=node)))
        with refused(401):
            client.PullMessages(PullMessagesRequest(node=Node(node_id=node + 1)))


def test_a_reply_in_the_name_of_another_node_is_refused(served, first_key):
    """The SuperLink checks the node that pushes, and not the one that a reply names."""
    body = PushMessagesRequest(
        node=Node(node_id=1),
        messages_list=[
            Message(metadata=Metadata(src_node_id=1)),
            Message(metadata=Metadata(src_node_id=2)),
        ],
    ).SerializeToString()
    before = logged(served, "push-messages")
    for content, status in ((body, "403"), (b"\xff", "400")):
        head = (
            f"POST /v1/fleet/push-messages HTTP/1.1\r\nHost: x\r\nContent-Type: application/protobuf\r\n"
            f"flwr-public-key: {b64encode(first_key).decode()}\r\nContent-Length: {len(content)}"
        )
        assert raw_answer(served, head, content).split()[1] == status
    assert logged(served, "push-messages") == before


EMPTY_MESSAGES = b"\x12\x00"
TREES_WITHIN_A_TREE = b"\x1a\x80\x80\x40" + b"\x12\x00" * 2**19


def call_by_hand(served: Served, key: bytes, call: str, body: bytes) -> tuple[str, float]:
    """The status of a call that is not signed, and the seconds until it came."""
    head = (
        f"POST /v1/fleet/{call} HTTP/1.1\r\nHost: x\r\nContent-Type: application/protobuf\r\n"
        f"flwr-public-key: {b64encode(key).decode()}\r\nContent-Length: {len(body)}"
    )
    start = time.monotonic()
    return raw_answer(served, head, body).split()[1], time.monotonic() - start


@pytest.mark.parametrize("body", [EMPTY_MESSAGES * 524_000, TREES_WITHIN_A_TREE])
def test_a_megabyte_of_empty_messages_stops_nobody_elses_calls(served, first_key, body):
    """Nobody has signed them. Each used to take the gate, and then the SuperLink, a second or more in which it answered
    no other call."""
    others: list[float] = []
    with ThreadPoolExecutor(4) as pool:
        floods = [pool.submit(call_by_hand, served, first_key, "push-messages", body) for _ in range(12)]
        while not all(flood.done() for flood in floods):
            status, seconds = call_by_hand(served, first_key, "pull-messages", b"")
            assert status == "401"
            others.append(seconds)
    assert {flood.result()[0] for flood in floods} == {"400"}
    assert max(others) < 2.5


def test_slow_requests_to_join_do_not_take_the_places_of_those_who_have_joined(served, first_key):
    """More than the gate answers at once, from somebody without a token."""
    context = ssl.create_default_context(cafile=served.lab.certificates.authority)
    head = b"POST /safari/join HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            plain = socket.create_connection(("127.0.0.1", served.lab.port), 30)
            channel = stack.enter_context(context.wrap_socket(plain, server_hostname="127.0.0.1"))
            channel.sendall(head)
        ours = f"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nflwr-public-key: {b64encode(first_key).decode()}"
        assert raw_answer(served, f"{ours}\r\nContent-Length: 0").split()[1] in ("401", "415")
    # And when they are gone, one can join again.
    wait_until("there is room to join", lambda: joins_again(served, first_key), 30)


def joins_again(served: Served, key: bytes) -> bool:
    with contextlib.suppress(SafariError):
        served.join(0, key)
        return True
    return False


def test_the_bodies_of_all_requests_together_are_bounded(monkeypatch, tmp_path):
    """Without a SuperLink: it is not reached."""
    monkeypatch.setattr("safari.lab.gate.LARGEST_SUM", 1000)
    gate = Gate("127.0.0.1:9", make_certificates(tmp_path, ["127.0.0.1"]).authority, report=lambda text: None)

    def call(size: int) -> int:
        with TestClient(gate.app) as client:
            return client.post("/v1/fleet/pull-messages", content=b"x" * size).status_code

    # 502: nobody listens behind this one. What was counted is let go each time.
    assert [call(size) for size in (900, 1001, 900, 1001, 900)] == [502, 503, 502, 503, 502]


def test_without_invitations_a_key_is_a_strangers_until_the_superlink_accepts_it(monkeypatch, tmp_path):
    """A stranger's calls are small and few at a time, so that they do not take the places of devices."""
    monkeypatch.setattr("safari.lab.gate.LARGEST_OF_STRANGER", 100)
    gate = Gate("127.0.0.1:9", make_certificates(tmp_path, ["127.0.0.1"]).authority, report=lambda text: None)
    accepts = {"good"}

    def superlink(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if request.headers["flwr-public-key"] in accepts else 401)

    gate._to |= {"transport": httpx.MockTransport(superlink)}
    with TestClient(gate.app) as client:

        def call(key: str, size: int) -> int:
            answer = client.post(
                "/v1/fleet/pull-messages", content=b"x" * size, headers={"flwr-public-key": key}
            )
            return answer.status_code

        # 503: a SuperNode tries again.
        assert [call("good", 102), call("good", 100), call("good", 102)] == [503, 200, 200]
        assert [call("bad", 102), call("bad", 100), call("bad", 102)] == [503, 401, 503]
        gate.strangers = 0
        assert [call("good", 2), call("bad", 2)] == [200, 503]


def test_a_superlink_that_accepts_every_key_does_not_make_the_gate_grow(monkeypatch, tmp_path):
    monkeypatch.setattr("safari.lab.gate.MOST_KEYS", 3)
    gate = Gate("127.0.0.1:9", make_certificates(tmp_path, ["127.0.0.1"]).authority, report=lambda text: None)
    gate._to |= {"transport": httpx.MockTransport(lambda request: httpx.Response(200))}
    with TestClient(gate.app) as client:
        for key in ("", "k" * 513, *(f"key-{number}" for number in range(5))):
            answer = client.post("/v1/fleet/pull-messages", headers={"flwr-public-key": key})
            assert answer.status_code == 200
    assert gate._keys == {"key-0", "key-1", "key-2"}


def test_a_connection_without_a_handshake_is_closed(monkeypatch, tmp_path):
    """It holds a descriptor, and asyncio tells of connections only after their handshake."""
    monkeypatch.setattr("safari.view.server.HANDSHAKE", 0.5)
    files = make_certificates(tmp_path, ["127.0.0.1"])

    async def silent() -> bytes:
        with listen("127.0.0.1", 0) as where:
            server = PageServer(Starlette(), where, certificate=files.server, key=files.key)
            running = asyncio.create_task(server.run(lambda: None))
            reader, writer = await asyncio.open_connection(*where.getsockname())
            try:
                return await asyncio.wait_for(reader.read(), 20)
            finally:
                writer.close()
                server.stop()
                await running

    assert asyncio.run(silent()) == b""


def test_a_flood_of_silent_connections_displaces_its_own_and_nobody_elses(tmp_path):
    files, reports = make_certificates(tmp_path, ["127.0.0.1"]), []
    context = ssl.create_default_context(cafile=files.authority)

    async def flood() -> tuple[str, int, int]:
        with listen("127.0.0.1", 0) as where:
            limits, place = Limits(silent=5), where.getsockname()
            server = PageServer(
                Starlette(), where, limits, reports.append, certificate=files.server, key=files.key
            )
            running = asyncio.create_task(server.run(lambda: None))
            # Somebody whose handshake takes long, because of a bad link.
            answers, slow = await asyncio.open_connection(*place)
            streams = [await asyncio.open_connection(*place, local_addr=("127.0.0.2", 0)) for _ in range(30)]
            ends = [asyncio.create_task(reader.read()) for reader, _ in streams]
            done, _ = await asyncio.wait(ends[:26], timeout=30)
            left = sum(not end.done() for end in ends)
            try:
                await asyncio.wait_for(slow.start_tls(context, server_hostname="127.0.0.1"), 10)
                slow.write(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
                await slow.drain()
                answer = await asyncio.wait_for(answers.read(), 10)
            finally:
                for writer in (slow, *(writer for _, writer in streams)):
                    writer.close()
                server.stop()
                await running
                await asyncio.gather(*ends, return_exceptions=True)
            return answer.decode().splitlines()[0], len(done), left

    # Five in all: the slow one, and the last four of the flood.
    assert asyncio.run(flood()) == ("HTTP/1.1 404 Not Found", 26, 4)
    words = "too many connections say nothing: closing those from 127.0.0.2 (reported at most once a minute)"
    assert reports == [words]


def test_a_flood_from_many_addresses_does_not_displace_those_who_take_part(tmp_path):
    """One connection from each address: no address has more than another."""
    files = make_certificates(tmp_path, ["127.0.0.1"])
    context = ssl.create_default_context(cafile=files.authority)
    request = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

    async def answer(request: Request) -> Response:
        vouch(request.scope)
        return Response("here")

    async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        try:
            await asyncio.wait_for(writer.start_tls(context, server_hostname="127.0.0.1"), 10)
            writer.write(request)
            await writer.drain()
            return (await asyncio.wait_for(reader.read(), 10)).decode().splitlines()[0]
        except (OSError, IndexError):
            return "closed"
        finally:
            writer.close()

    async def flood() -> list[str]:
        app = Starlette(routes=[Route("/", answer, methods=["POST"])])
        with listen("127.0.0.1", 0) as where:
            place = where.getsockname()
            server = PageServer(
                app, where, Limits(silent=5), lambda text: None, certificate=files.server, key=files.key
            )
            running = asyncio.create_task(server.run(lambda: None))

            async def begin(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                return await asyncio.open_connection(*place, local_addr=(address, 0))

            found = [await asked(*await begin("127.0.0.1"))]
            # Handshakes that take long, because of bad links: of one who has taken part, and of a newcomer.
            known, newcomer = await begin("127.0.0.1"), await begin("127.0.0.2")
            strangers = [await begin(f"127.1.{i // 200}.{1 + i % 200}") for i in range(300)]
            ends = [asyncio.create_task(reader.read()) for reader, _ in strangers]
            await asyncio.wait(ends[:296], timeout=30)
            try:
                found += [await asked(*known), await asked(*newcomer)]
                # A client that needs less time than it takes to displace all others is served.
                found.append(await asked(*await begin("127.0.0.3")))
            finally:
                for _, writer in strangers:
                    writer.close()
                server.stop()
                await running
                await asyncio.gather(*ends, return_exceptions=True)
            return found

    assert asyncio.run(flood()) == ["HTTP/1.1 200 OK", "HTTP/1.1 200 OK", "closed", "HTTP/1.1 200 OK"]


def test_somebody_else_behind_a_known_address_has_few_connections_that_give_way_last():
    limiter = ConnectionLimiter(Starlette(), Limits(silent=20), lambda kind, text: None)
    limiter.vouched(("10.0.0.1", 1))
    with contextlib.ExitStack() as stack:

        def connect(host: str, port: int) -> socket.socket:
            here, there = socket.socketpair()
            stack.enter_context(here)
            stack.enter_context(there)
            limiter.accepted(here, (host, port))
            there.setblocking(False)
            return there

        def is_closed(end: socket.socket) -> bool:
            try:
                return end.recv(1) == b""
            except BlockingIOError:
                return False

        newcomers = [connect(f"10.0.1.{k}", 1) for k in range(10)]
        neighbours = [connect("10.0.0.1", k) for k in range(40)]
        assert not any(map(is_closed, newcomers))
        assert sum(map(is_closed, neighbours)) == 30


def test_the_gate_has_descriptors_for_all_that_its_limits_allow():
    for clients in (1, 10, 1000):
        limits = limits_for(clients)
        to_superlink = 100
        assert limits.silent + limits.pending + limits.active + to_superlink < _DESCRIPTORS + _EACH * clients


def test_a_public_key_alone_gives_no_access(served):
    (_, public), (private, _) = generate_key_pairs(), generate_key_pairs()
    key = public_key_to_bytes(public)
    served.join(3, key)
    with served.fleet(served.outside, private, public) as client, refused(401):
        client.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30))


@pytest.mark.parametrize(("ahead", "words"), [(60, "60 s ahead of"), (-600, "600 s behind")])
def test_a_device_whose_clock_is_off_is_told(ahead, words, served, first_key, monkeypatch):
    private, _ = generate_key_pairs()
    real = node_auth_http_interceptor.now
    monkeypatch.setattr(node_auth_http_interceptor, "now", lambda: real() + timedelta(seconds=ahead))
    request = ActivateNodeRequest(public_key=first_key, heartbeat_interval=30)
    with (
        served.fleet(served.outside, private, bytes_to_public_key(first_key)) as client,
        pytest.raises(httpx.HTTPStatusError) as found,
    ):
        client.ActivateNode(request)
    # 400, because a SuperNode that is told 401 does not say why it ends.
    assert found.value.response.status_code == 400
    assert f"the device's clock is {words} the server's" in found.value.response.json()["detail"]
    # Each kind of line is reported once a minute.
    assert "the device's clock is" in (served.lab.folder / "gate.log").read_text()


def test_headers_that_are_no_text_are_passed_on_and_refused(served, first_key):
    key = b64encode(first_key).decode()
    head = (
        f"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nContent-Type: application/protobuf\r\n"
        f"flwr-public-key: {key}\r\nflwr-timestamp: \xff\xfe\r\nflwr-signature: \xe9\r\nContent-Length: 0"
    )
    assert raw_answer(served, head).split()[1] == "401"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 403),
        (b"[]", 403),
        (b"[" * 4000, 403),
        (b'{"client": "0", "clients": 4, "token": "", "public-key": ""}', 403),
        (b'{"client": true, "clients": 4, "token": "", "public-key": ""}', 403),
        (b'{"client": 0, "token": "", "public-key": ""}', 403),
        (b'{"client": 0, "clients": 4, "token": "\\ud800", "public-key": ""}', 403),
        (b'{"client": 99999999999999999999999999, "clients": 4, "token": "", "public-key": ""}', 403),
        (b"\xff" * 100, 403),
        (b" " * 5000, 413),
    ],
)
def test_malformed_requests_to_join_are_refused_with_a_reason(served, body, status):
    context = ssl.create_default_context(cafile=served.lab.certificates.authority)
    answer = httpx.post(
        f"https://{served.outside}/safari/join", content=body, verify=context, trust_env=False
    )
    assert answer.status_code == status
    assert answer.json()["detail"]


@pytest.mark.slow
def test_flowers_own_commands_are_refused_outside(served, tmp_path):
    """`flwr run` and `flower-supernode`, as whoever has found the port would use them."""
    app(tmp_path / "harm")
    home, authority = tmp_path / "flwr", served.lab.certificates.authority
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink.outside]\naddress = "{served.outside}"\nroot-certificates = "{authority}"\n'
    )
    tools = Path(sys.executable).parent
    environment = os.environ | {
        "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": os.pathsep.join([str(tools), os.environ["PATH"]]),
    }  # fmt: skip

    def run(*command: object) -> tuple[int, str]:
        # Into a file: what a SuperNode has started may outlive it for a moment, and would hold a pipe open.
        with (tmp_path / "log").open("w") as log:
            found = subprocess.run(
                [tools / str(command[0]), *map(str, command[1:])],
                env=environment, cwd=tmp_path, stdout=log, stderr=log, timeout=120, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        return found.returncode, (tmp_path / "log").read_text(errors="replace")

    before = logged(served, "/v1/control/"), logged(served, "/v1/fleet/")
    for command in (["run", tmp_path / "harm", "outside"], ["list", "outside"]):
        code, told = run("flwr", *command)
        assert code != 0, told
    private, _ = generate_key_pairs()
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    (tmp_path / "foreign.key").write_bytes(pem)
    for own in ((), ("--auth-supernode-private-key", tmp_path / "foreign.key")):
        node = ("--superlink", served.outside, "--root-certificates", authority, "--port", free_port())
        _, told = run("flower-supernode", *node, *own)
        assert "SuperNode ID" not in told
        assert ("no key that has joined" if own else "no Fleet call") in told
    assert (logged(served, "/v1/control/"), logged(served, "/v1/fleet/")) == before


@pytest.mark.slow
def test_clients_are_given_the_approved_app_alone(served, tmp_path):
    """Somebody on the server's machine has submitted another app: its code does not reach the clients."""
    good, harm = build_fab_from_disk(served.lab.app), app(tmp_path / "harm", "import time; time.sleep(301)")
    private, public = generate_key_pairs()
    key = public_key_to_bytes(public)
    served.join(2, key)
    with served.control(served.inside) as control, served.fleet(served.outside, private, public) as client:
        node = Node(
            node_id=client.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30)).node_id
        )

        def get(content: bytes) -> bytes:
            run = control.StartRun(StartRunRequest(fab=Fab(content=content))).run_id

            def is_running() -> bool:
                return control.ListRuns(ListRunsRequest()).run_dict[run].status.status == "running"

            wait_until("the app runs", is_running, 120)
            return client.GetFab(
                GetFabRequest(node=node, run_id=run, hash_str=app_digest(content))
            ).fab.content

        assert get(good) == good
        with refused(403):
            get(harm)


@pytest.mark.slow
def test_a_flood_of_half_open_connections_passes(served):
    """More than the gate has descriptors for, none of which says a word: others are served meanwhile."""
    log = served.lab.folder / "gate.log"
    with contextlib.ExitStack() as stack:
        for _ in range(700):
            found = stack.enter_context(socket.socket())
            found.bind(("127.0.0.2", 0))
            found.setblocking(False)
            found.connect_ex(("127.0.0.1", served.lab.port))
        wait_until("the flood is noticed", lambda: "too many connections say nothing" in log.read_text(), 30)
        with served.control(served.outside) as client, refused(404):
            client.ListRuns(ListRunsRequest())
    assert "Too many open files" not in log.read_text()
    assert len(log.read_text().splitlines()) < 50


@pytest.mark.slow
def test_a_real_gate_lets_a_client_that_has_joined_in_through_a_flood_from_many_addresses(served):
    """From the address of the client a handshake that takes long; 700 strangers come before it is done."""
    _, public = generate_key_pairs()
    served.join(2, public_key_to_bytes(public))
    context = ssl.create_default_context(cafile=served.lab.certificates.authority)
    strangers = []

    def is_closed(end: socket.socket) -> bool:
        try:
            return end.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(socket.create_connection(("127.0.0.1", served.lab.port), 30))
        for i in range(700):
            found = stack.enter_context(socket.socket())
            found.bind((f"127.3.{i // 200}.{1 + i % 200}", 0))
            found.setblocking(False)
            found.connect_ex(("127.0.0.1", served.lab.port))
            strangers.append(found)
        wait_until("strangers give way", lambda: is_closed(strangers[400]), 30)
        channel = stack.enter_context(context.wrap_socket(slow, server_hostname="127.0.0.1"))
        channel.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert channel.recv(100).startswith(b"HTTP/1.1 404")


@pytest.mark.slow
def test_those_who_have_joined_are_known_after_a_restart(tmp_path):
    private, public = generate_key_pairs()
    key = public_key_to_bytes(public)
    for start in range(2):
        lab = Lab(tmp_path / "lab", "127.0.0.1", free_port(), free_port(), {"clients": 2, "rounds": 1})
        lab.prepare()
        with superlink(lab):
            served = Served(lab)
            if start == 0:
                served.join(1, key)
                token = lab.invitations.token(1)
            with served.fleet(served.outside, private, public) as client:
                assert client.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30)).node_id
    assert lab.invitations.token(1) == token
