"""Real sockets on loopback: the same two ends, a relay between them, and an outsider."""

from __future__ import annotations

import asyncio
import socket
import time

import numpy as np
import pytest

from safari.errors import SafariError
from safari.net.client import Expired
from safari.net.fec import Source
from safari.net.offer import Offer
from safari.net.pace import Pacing
from safari.net.path import Conditions
from safari.net.seal import Drop, Session
from safari.net.udp import ClientSocket, Relay, ServerSocket, clock
from safari.wire.identity import Identity

MESSAGE = np.random.default_rng(0).bytes(50_000)
PACKETS = [np.random.default_rng([1, i]).bytes(1000) for i in range(60)]
HOST = "127.0.0.1"


def offer_for(server: ServerSocket, source: Source, name: str, port: int, deadline: float = 20.0) -> Offer:
    session = Session.fresh(Identity(name, 0, bytes(8)))
    server.open(session, source, 1_000_000)
    shape = source.shape
    return Offer(
        HOST, port, session.id, session.secret, name, 0, bytes(8), shape.size, shape.digest, deadline, 3e6
    )


async def take_part(offer: Offer, number: int) -> int:
    with ClientSocket(offer, rng=np.random.default_rng(number)) as client:
        assert await client.receive_async() == MESSAGE
        return (await client.upload_async(PACKETS)).unsent


def test_a_round_over_a_relay_that_loses_a_third():
    weather = Conditions(loss=0.3, delay=0.005)

    async def everybody() -> list[Offer]:
        source = Source(MESSAGE)
        async with Relay(HOST, (HOST, server.port), weather, weather, seed=1) as relay:
            offers = [offer_for(server, source, str(i), relay.port) for i in range(8)]
            assert await asyncio.gather(*[take_part(o, i) for i, o in enumerate(offers)]) == [0] * 8
            await asyncio.sleep(0.1)
            assert relay.lost == pytest.approx((0.3, 0.3), abs=0.08)
            return offers

    with ServerSocket(HOST, pacing=Pacing(rate=3e6)) as server:
        uploads = [server.close(offer.session) for offer in asyncio.run(everybody())]
    assert all(upload.informed for upload in uploads)
    assert sum(len(upload.packets) for upload in uploads) / 480 == pytest.approx(0.7, abs=0.12)
    assert all(PACKETS[i] == data for upload in uploads for i, data in upload.packets.items())


def test_blocking_calls_and_an_outsider():
    with ServerSocket(HOST, pacing=Pacing(rate=3e6)) as server:
        source = Source(MESSAGE)
        offer = offer_for(server, source, "a", server.port)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outsider:
            for i in range(50):
                outsider.sendto(b"\xa1" + offer.session + bytes(20 + i), (HOST, server.port))
        with ClientSocket(offer, rng=np.random.default_rng(0)) as client:
            assert client.receive() == MESSAGE
            assert client.upload(PACKETS).packets == 60
        server.wait([offer.session], clock() + 10)
        assert server.complete(offer.session)
        assert server.close(offer.session).packets == dict(enumerate(PACKETS))
        assert server.counts.dropped[Drop.FORGED] == 50 - server.counts.dropped[Drop.TRUNCATED] > 0


def test_a_flood_from_many_addresses_is_kept_nowhere_and_answered_nowhere():
    """An outsider needs no cookie to be forgotten: without the session's secret it leaves nothing behind."""
    with ServerSocket(HOST, pacing=Pacing(rate=3e6)) as server:
        offer = offer_for(server, Source(MESSAGE), "a", server.port)
        outsiders = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(300)]
        try:
            for i, outsider in enumerate(outsiders):
                outsider.bind((f"127.2.{i // 200}.{1 + i % 200}", 0))
                # Full-size requests, of a session that there is and of one that there is not.
                for session in (offer.session, i.to_bytes(8, "little")):
                    outsider.sendto(b"\xa1" + session + bytes(1191), (HOST, server.port))
            with ClientSocket(offer, rng=np.random.default_rng(0)) as client:
                assert client.receive() == MESSAGE
                client.upload(PACKETS)
            server.wait([offer.session], clock() + 10)
            assert server.close(offer.session).packets == dict(enumerate(PACKETS))
            for outsider in outsiders:
                outsider.setblocking(False)
                with pytest.raises(BlockingIOError):
                    outsider.recv(2000)
        finally:
            for outsider in outsiders:
                outsider.close()
        dropped, core = server.counts.dropped, server._core
        assert dropped[Drop.FORGED] > 0
        assert dropped[Drop.FOREIGN] > 0
        assert (len(core._peers), len(core._retired), len(core._rates)) == (0, 1, 1)


def test_the_server_hears_that_the_broadcast_came_before_the_client_trains():
    with ServerSocket(HOST, pacing=Pacing(rate=3e6)) as server:
        offer = offer_for(server, Source(MESSAGE[:20_000]), "a", server.port)
        with ClientSocket(offer, rng=np.random.default_rng(0)) as client:
            assert client.receive() == MESSAGE[:20_000]
            end = clock() + 10
            while not server.look(offer.session).informed and clock() < end:
                time.sleep(0.01)
            found = server.look(offer.session)
    assert found.informed
    assert 0 < found.round_trip < 10


def test_a_server_that_is_not_there_costs_the_deadline_and_no_more():
    with ServerSocket(HOST) as gone:
        source = Source(MESSAGE)
        offer = offer_for(gone, source, "a", gone.port, deadline=0.4)
    start = clock()
    with ClientSocket(offer, rng=np.random.default_rng(0)) as client:
        assert client.receive() == Expired(0, 44, 0)
    assert 0.35 < clock() - start < 5


def test_waiting_ends_with_the_deadline_or_when_asked_to():
    with ServerSocket(HOST) as server:
        offer = offer_for(server, Source(MESSAGE), "a", server.port)
        start = clock()
        server.wait([offer.session], start + 0.2)
        assert clock() - start >= 0.2
        server.wait([offer.session], start + 60, stop=lambda: True)
        assert clock() - start < 30


def test_addresses_that_cannot_be_used_are_refused_in_words():
    with (
        ServerSocket(HOST) as server,
        pytest.raises(SafariError, match=f"at {HOST} port {server.port}: Addr"),
    ):
        ServerSocket(HOST, server.port)
    with pytest.raises(SafariError, match="host 'no such host' must be a name or an address"):
        ServerSocket("no such host")
