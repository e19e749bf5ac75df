"""Whatever is sent to a server's port: no crash, no growth, nothing accepted that was not sealed for it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from net.fuzzing import KINDS, PACING, Attack, expected, held
from net.joined import session_for
from safari.net.channel import Channel
from safari.net.client import Client, Ready
from safari.net.fec import Source
from safari.net.seal import DOWN, UP, Counts, Drop
from safari.net.server import Server

FEW = 5_000
MANY = 1_000_000


@pytest.mark.parametrize(
    ("count", "heard"),
    [(FEW, "before"), (FEW, "after"), pytest.param(MANY, "after", marks=pytest.mark.slow),
     pytest.param(MANY, "before", marks=pytest.mark.slow)],
)  # fmt: skip
def test_hostile_datagrams_are_dropped_for_the_right_reason(count, heard):
    """`heard`: what the attacker has recorded was received before, so that its copies are replays; or the
    attacker is faster with everything but plain copies, and the honest ones must still get through."""
    attack = Attack.prepare()
    server, reasons, accepted = attack.server, expected(), attack.accepted
    # In any order: within the window that does no harm.
    shuffled = np.random.default_rng(1).permutation(len(attack.honest)).tolist()
    honest = [attack.honest[i] for i in shuffled]
    if heard == "before":
        for data, client in honest:
            server.receive(data, client, 0.1)
        # Sealed bytes under another name meet that client's own window first.
        accepted += len(honest)
    assert server.counts.accepted == accepted
    before, told = held(server), dict.fromkeys(KINDS, 0)
    tracemalloc.start()
    for i, (kind, data) in enumerate(attack.datagrams(count, np.random.default_rng(count))):
        if kind == "replayed" and heard == "after":
            continue
        drops = dict(server.counts.dropped)
        server.receive(data, ("attacker", i % 7), 0.2)
        (why,) = [reason for reason in Drop if server.counts.dropped[reason] != drops[reason]]
        assert why in reasons[kind], (kind, why)
        told[kind] += 1
        if i == FEW // 10:
            level = tracemalloc.get_traced_memory()[0]
    grown = tracemalloc.get_traced_memory()[0] - level
    tracemalloc.stop()
    assert server.counts.accepted == accepted
    assert held(server) == before
    assert grown < 100_000
    assert sum(told.values()) >= 0.9 * count
    if heard == "after":
        for data, client in honest:
            server.receive(data, client, 0.3)
        assert server.counts.accepted == accepted + len(honest)
    uploads = [server.close(session.id) for session in attack.sessions]
    assert all(upload.complete for upload in uploads)
    assert all(data == bytes([i]) * (20 + 5 * i) for u in uploads for i, data in u.packets.items())
    # No address but the clients' own was ever taken.
    assert all(address in ("a", "b", "c") for _, address in server.poll(100.0))


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_authentic_garbage_of_a_hostile_client_harms_only_itself(count):
    rng = np.random.default_rng(count)
    source, server = Source(bytes(200_000)), Server(epoch=1, pacing=PACING)
    hostile, honest = session_for("hostile"), session_for("honest")
    for session in (hostile, honest):
        server.open(session, source, 0.0, 100_000)
    end = Channel(hostile, out=UP, back=DOWN, epoch=2, now=0.0, pacing=PACING, counts=Counts())
    sizes, kinds = rng.integers(0, 1100, count), rng.integers(0, 16, count)
    sent = 0
    for i in range(count):
        server.receive(end._sealer.seal(int(kinds[i]), rng.bytes(int(sizes[i]))), "there", i * 1e-4)
        sent += len(server.poll(i * 1e-4))
    upload = server.look(hostile.id)
    assert sum(map(len, upload.packets.values())) <= 100_000
    assert server.counts.total == count
    # Reports in answer to its data, and never more of the broadcast than to anybody else.
    assert upload.sent <= 8 * source.shape.symbols[0] + 32
    assert sent <= upload.sent + count * 1e-4 / 0.05 + count / 32 + 1
    assert held(server) < 20_000
    good = Channel(honest, out=UP, back=DOWN, epoch=2, now=0.0, pacing=PACING, counts=Counts())
    server.receive(good.data(b"\0\0\1\0model", 0.0), "here", 0.0)
    assert server.close(honest.id).packets == {0: b"model"}


def test_a_client_takes_nothing_but_its_own_broadcast():
    rng = np.random.default_rng(0)
    message = rng.bytes(20_000)
    source = Source(message)
    session, other = session_for("a"), session_for("b")
    client = Client(session, source.shape, now=0.0, deadline=9.0, epoch=2, rng=rng)
    ends = [
        Channel(s, out=DOWN, back=UP, epoch=1, now=0.0, pacing=PACING, counts=Counts())
        for s in (session, other)
    ]
    own, foreign = ([end.data(source.symbol(0, i), 0.0) for i in range(18)] for end in ends)
    for i in range(FEW):
        data = own[i % 18]
        at = i % len(data)
        client.receive(data[:at] + bytes([data[at] ^ 1 + i % 255]) + data[at + 1 :], 0.1)
        client.receive(foreign[i % 18], 0.1)
        client.receive(rng.bytes(i % 1300), 0.1)
    assert client.counts.accepted == 0
    assert client.counts.total == 3 * FEW
    for data in own:
        client.receive(data, 0.2)
    assert client.counts.accepted == source.shape.symbols[0] == 18
    assert client.next_event() == Ready(message)
