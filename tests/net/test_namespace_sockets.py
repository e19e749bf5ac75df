"""Real sockets in network namespaces, with loss by nft: what the link delivers is what arrives."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from net.namespaces import SERVER, Network, why_not
from safari.net.fec import Source
from safari.net.offer import Offer
from safari.net.pace import Pacing
from safari.net.seal import Session
from safari.net.udp import ClientSocket, ServerSocket, clock
from safari.wire.identity import Identity

MESSAGE = np.random.default_rng(0).bytes(60_000)
PACKETS = [np.random.default_rng([1, i]).bytes(1000) for i in range(150)]
RATE = 2e6

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def offers(server: ServerSocket, count: int, round: int) -> list[Offer]:
    source, out = Source(MESSAGE), []
    for i in range(count):
        session = Session.fresh(Identity(f"{i}", round, bytes(8)))
        server.open(session, source, 1_000_000)
        shape = source.shape
        out.append(
            Offer(
                SERVER,
                server.port,
                session.id,
                session.secret,
                f"{i}",
                round,
                bytes(8),
                shape.size,
                shape.digest,
                15.0,
                RATE,
            )
        )
    return out


def take_part(offer: Offer) -> str:
    async def work() -> str:
        with ClientSocket(offer, rng=np.random.default_rng(int(offer.client))) as client:
            found = await client.receive_async()
            if not isinstance(found, bytes):
                return "nothing"
            assert found == MESSAGE
            return f"{(await client.upload_async(PACKETS)).unsent}"

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("weather", "share", "margin"),
    [
        (None, 1.0, 0.001),
        (lambda network: network.lose(30), 0.7, 0.08),
        pytest.param(lambda network: network.lose_in_bursts(30, 12), 0.7, 0.08, marks=pytest.mark.slow),
        pytest.param(lambda network: network.lose(60), 0.4, 0.08, marks=pytest.mark.slow),
    ],
)
def test_delivered_is_what_the_link_delivers(tmp_path, weather, share, margin):
    clients = 2
    with Network(clients, tmp_path) as network:
        server = network.inside("server", lambda: ServerSocket(SERVER, pacing=Pacing(rate=RATE)))
        try:
            if weather is not None:
                weather(network)
            arrived = []
            for round in range(2):
                for i, offer in enumerate(offers(server, clients, round)):
                    assert network.inside(f"client-{i}", lambda offer=offer: take_part(offer)) == "0"
                    server.wait([offer.session], clock() + (0.3 if weather else 10))
                    upload = server.close(offer.session)
                    assert upload.informed
                    assert all(PACKETS[number] == data for number, data in upload.packets.items())
                    arrived.append(len(upload.packets) / len(PACKETS))
            assert np.mean(arrived) == pytest.approx(share, abs=margin)
            assert server.counts.dropped["forged"] == 0
        finally:
            server.stop()
