"""Two ends joined in memory: a round under every kind of bad weather, in virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from net.joined import Net, session_for
from safari.errors import SafariError
from safari.net.client import PACKET, Client, Expired
from safari.net.fec import Source
from safari.net.pace import Pacing
from safari.net.path import Conditions
from safari.net.seal import DATAGRAM, Drop
from safari.net.server import UNPROVEN, Server

MESSAGE = np.random.default_rng(0).bytes(60_000)
PACKETS = [np.random.default_rng([1, i]).bytes(900 + i) for i in range(200)]
FAST = Pacing(rate=1e6)


def run(up: Conditions, down: Conditions | None = None, **options) -> Net:
    return Net.start(MESSAGE, [PACKETS] * 3, up, down or up, **{"pacing": FAST, **options}).run()


@pytest.mark.parametrize("delay", [0.02, 5.0])
@pytest.mark.parametrize("loss", [0.0, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("burst", [1.0, 20.0])
def test_the_broadcast_arrives_whole_and_the_upload_as_far_as_the_link_delivers(loss, delay, burst):
    net = run(Conditions(loss=loss, delay=delay, burst=burst), deadline=300)
    assert all(story.message == MESSAGE and story.expired is None for story in net.stories)
    uploads = [net.server.close(session.id) for session in net.sessions]
    assert all(PACKETS[number] == data for upload in uploads for number, data in upload.packets.items())
    assert all(upload.informed and upload.total in (200, 0) for upload in uploads)
    delivered = sum(len(upload.packets) for upload in uploads) / 600
    # Bursts of 20 leave about 30 independent draws.
    assert delivered == pytest.approx(1 - loss, abs=0.06 if burst == 1 else 0.3)
    # What the broadcast cost: its symbols over the share that arrives, and something for what is not known
    # yet.
    for upload in uploads:
        most = (1.6 if burst == 1 else 2.5) * net.source.shape.symbols[0] / (1 - loss) + 20
        assert upload.sent <= most


def test_reordered_and_duplicated_datagrams_count_once():
    net = run(Conditions(delay=0.02, jitter=0.2, duplicates=0.5))
    assert all(story.message == MESSAGE for story in net.stories)
    assert all(net.server.close(session.id).complete for session in net.sessions)
    assert net.server.counts.dropped[Drop.REPLAYED] > 200
    assert net.server.counts.dropped[Drop.FORGED] == 0


def test_a_client_whose_downlink_is_cut_sits_out():
    net = run(Conditions(delay=0.02), Conditions(loss=1.0), deadline=5)
    assert [story.expired for story in net.stories] == [Expired(0, 53, 0)] * 3
    upload = net.server.close(net.sessions[0].id)
    assert (upload.asked, upload.informed, upload.total) == (True, False, 0)
    # An address that never answers gets little, however often it is asked for.
    assert upload.sent <= UNPROVEN + 2 * net.up[0].offered


def test_a_client_whose_uplink_is_cut_gets_nothing():
    net = run(Conditions(loss=1.0), Conditions(), deadline=5)
    upload = net.server.close(net.sessions[0].id)
    assert (upload.asked, upload.sent) == (False, 0)
    assert net.stories[0].expired == Expired(0, 53, 0)


def test_packets_that_the_deadline_cuts_off_are_counted():
    net = run(Conditions(delay=0.02), deadline=2.0, pacing=Pacing(rate=50_000))
    expired = [story.expired for story in net.stories]
    assert all(found.unsent > 50 for found in expired)
    arrived = [set(net.server.close(session.id).packets) for session in net.sessions]
    assert all(len(found) == 200 - e.unsent for found, e in zip(arrived, expired, strict=True))
    # Each client sends in an order of its own, so the deadline cuts off other packets of each.
    assert arrived[0] != arrived[1] != arrived[2]


def test_a_round_that_is_over_is_stale():
    net = run(Conditions(delay=0.02))
    late = net.clients[0].channel.data(b"\0\0\1\0late", net.now)
    net.server.close(net.sessions[0].id)
    net.server.receive(late, 0, net.now)
    assert net.server.counts.dropped[Drop.STALE] == 1
    with pytest.raises(SafariError, match="must be open: it is not"):
        net.server.close(net.sessions[0].id)
    with pytest.raises(SafariError, match="must be new: it has been used before"):
        net.server.open(net.sessions[0], net.source, net.now, 1)


def test_the_same_seed_gives_the_same_round():
    first, second = (run(Conditions(loss=0.3, delay=0.02), seed=4) for _ in range(2))
    assert first.stories == second.stories
    uploads = [[net.server.close(s.id) for s in net.sessions] for net in (first, second)]
    assert uploads[0] == uploads[1]


# --- addresses


class Bench:
    """A server and one client, by hand."""

    def __init__(self):
        self.session, self.source = session_for("x"), Source(MESSAGE)
        self.server = Server(epoch=1, pacing=FAST)
        self.server.open(self.session, self.source, 0.0, 100_000)
        self.client = Client(
            self.session, self.source.shape, now=0.0, deadline=60.0, epoch=2,
            rng=np.random.default_rng(0), pacing=FAST,
        )  # fmt: skip

    def ask(self, now: float) -> bytes:
        (data,) = self.client.poll(now)
        return data


def test_nothing_is_sent_before_somebody_asks():
    bench = Bench()
    assert bench.server.next_time() is None
    assert bench.server.poll(1.0) == []


def test_an_address_gets_little_until_it_has_shown_that_it_receives():
    bench = Bench()
    ask = bench.ask(0.0)
    assert len(ask) == DATAGRAM
    bench.server.receive(ask, "there", 0.0)
    sent = [d for t in range(100) for d in bench.server.poll(t / 10)]
    assert len(sent) == UNPROVEN + 2
    assert {address for _, address in sent} == {"there"}
    # One of them came, and the client says so.
    bench.client.receive(sent[0][0], 10.0)
    bench.server.receive(bench.ask(10.2), "there", 10.2)
    assert len([d for t in range(100) for d in bench.server.poll(10.2 + t / 10)]) >= 53 + 2 - 34


def test_only_the_newest_authentic_datagram_moves_a_client():
    bench = Bench()
    first, second, third = bench.ask(0.0), bench.ask(0.2), bench.ask(0.6)
    bench.server.receive(second, "new", 0.2)
    bench.server.receive(first, "old", 0.3)
    bench.server.receive(second, "replay", 0.3)
    bench.server.receive(third[:-1] + b"\0", "forged", 0.3)
    assert {address for _, address in bench.server.poll(0.4)} == {"new"}
    assert bench.server.counts.dropped[Drop.REPLAYED] == 1
    assert bench.server.counts.dropped[Drop.FORGED] == 1


def test_somebody_who_moves_from_address_to_address_is_not_sent_more():
    bench = Bench()
    total = 0
    for i in range(20):
        now = 0.6 * i
        bench.server.receive(bench.ask(now), f"victim {i}", now)
        total += len([d for t in range(5) for d in bench.server.poll(now + t / 10)])
    assert total <= UNPROVEN + 2 * 20


# --- what a client with a valid secret may try


def hostile(bench: Bench, kind: int, body: bytes) -> None:
    bench.server.receive(bench.client.channel._sealer.seal(kind, body), "there", 0.0)


def number(value: int) -> bytes:
    return value.to_bytes(2, "little")


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        (0, b"anything", Drop.MALFORMED),
        (1, b"", Drop.MALFORMED),
        (1, bytes(4), Drop.MALFORMED),
        (1, bytes(4) + number(0) + number(1), Drop.MALFORMED),
        (1, bytes(4) + number(5) + number(5) + b"x", Drop.MALFORMED),
        (2, bytes(16), Drop.MALFORMED),
        (2, bytes(15) + number(3) + bytes(4), Drop.MALFORMED),
        (2, bytes(15) + number(600) + bytes(1200), Drop.MALFORMED),
        (15, bytes(100), Drop.MALFORMED),
    ],
)
def test_authentic_nonsense_is_dropped_and_counted(kind, body, reason):
    bench = Bench()
    hostile(bench, kind, body)
    assert bench.server.counts.dropped[reason] == 1
    assert bench.server.close(bench.session.id).packets == {}


def test_a_client_cannot_store_more_than_it_was_given_room_for():
    bench = Bench()
    for i in range(500):
        hostile(bench, 1, bytes(4) + number(i) + number(500) + bytes(996))
        hostile(bench, 1, bytes(4) + number(i) + number(500) + b"again")
    upload = bench.server.look(bench.session.id)
    assert len(upload.packets) == 100
    assert bench.server.counts.dropped[Drop.UNWANTED] == 900
    hostile(bench, 1, bytes(4) + number(0) + number(400) + b"another total")
    assert bench.server.counts.dropped[Drop.MALFORMED] == 1


def test_reports_of_nonsense_make_the_server_send_no_more_than_its_limit():
    bench = Bench()
    bench.server.receive(bench.ask(0.0), "there", 0.0)
    sent = [d for t in range(100) for d in bench.server.poll(t / 100)]
    for _ in range(300):
        lies = b"\0" + (1).to_bytes(4, "little") + (0).to_bytes(6, "little") + bytes(4)
        hostile(bench, 2, lies + number(1) + number(65535))
        sent += [d for t in range(20) for d in bench.server.poll(1 + t / 10)]
    assert len(sent) <= 8 * 53 + UNPROVEN


@pytest.mark.parametrize(
    ("packets", "problem"),
    [
        ([], "an upload must hold 1 to 65535 packets, got 0"),
        ([bytes(PACKET + 1)], f"a packet must hold at most {PACKET} bytes, got {PACKET + 1}"),
    ],
)
def test_uploads_that_do_not_fit_are_refused(packets, problem):
    net = Net.start(MESSAGE, [PACKETS], Conditions(), Conditions(), pacing=FAST)
    net.packets = [packets]
    with pytest.raises(SafariError, match=problem):
        net.run()


def test_an_upload_before_the_broadcast_is_refused():
    with pytest.raises(SafariError, match="packets can be uploaded once, after the broadcast came"):
        Bench().client.upload(PACKETS, 0.0)


def test_the_round_trip_is_known_before_the_upload_and_remembered():
    slow = Conditions(delay=5.0)
    net = Net.start(MESSAGE[:20_000], [PACKETS[:3]], slow, slow, pacing=FAST, train=100.0, deadline=300)
    net.run(until=50.0)
    (session,) = net.sessions
    before = net.server.look(session.id)
    assert before.informed
    assert before.round_trip == pytest.approx(10.0, abs=0.5)
    net.server.close(session.id)
    again = session_for(session.identity.client, round=1)
    net.server.open(again, net.source, 60.0, 1000)
    assert net.server.look(again.id).round_trip == before.round_trip
