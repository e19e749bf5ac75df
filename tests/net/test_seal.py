"""Sealed datagrams: golden bytes, an independent opener, and everything that must not get through."""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from net.make_vectors import EPOCH, FOLDER, SESSION, datagrams
from safari.errors import SafariError
from safari.net.seal import DOWN, OVERHEAD, UP, WINDOW, Drop, Opened, Opener, Sealer, Session, session_of
from safari.wire.identity import Identity


def plain_key(session: Session, direction: str) -> bytes:
    """HKDF-SHA256 (RFC 5869) by hand."""
    extracted = hmac.digest(session.id, session.secret, "sha256")
    client = hashlib.sha256(session.identity.client.encode()).digest()[:8]
    identity = client + session.identity.round.to_bytes(4, "little") + session.identity.model
    return hmac.digest(extracted, b"safari net 1 " + direction.encode() + identity + b"\x01", "sha256")


def test_golden_datagrams_have_not_changed():
    found = datagrams()
    assert {path.stem for path in FOLDER.glob("*.bin")} == set(found)
    for name, data in found.items():
        assert data == (FOLDER / f"{name}.bin").read_bytes(), name


@pytest.mark.parametrize(("name", "direction"), [("packet", UP), ("symbol-0", DOWN)])
def test_a_golden_datagram_opens_by_the_description_alone(name, direction):
    data = (FOLDER / f"{name}.bin").read_bytes()
    head, nonce = data[:21], data[9:21]
    assert data[0] == 0xA1
    assert data[1:9] == SESSION.id
    assert int.from_bytes(data[9:15], "little") == EPOCH
    body = AESGCM(plain_key(SESSION, direction)).decrypt(nonce, data[21:], head)
    if name == "packet":
        assert body == (5000).to_bytes(4, "little") + b"\x03\x00\x09\x00packet"


def test_seal_and_open():
    sealer, opener = Sealer(SESSION, UP, 5), Opener(SESSION, UP)
    data = sealer.seal(2, b"hello")
    assert len(data) == len(b"hello") + OVERHEAD
    assert session_of(data) == SESSION.id
    assert opener.open(data) == Opened(2, 5, 0, b"hello", newest=True)
    assert opener.open(sealer.seal(1, b"")) == Opened(1, 5, 1, b"", newest=True)
    assert opener.highest == 1


def test_nothing_of_another_client_round_model_direction_or_secret_opens():
    data = Sealer(SESSION, UP, 5).seal(1, b"hello")
    i = SESSION.identity
    others = [
        Session(SESSION.id, SESSION.secret, Identity("client 8", i.round, i.model)),
        Session(SESSION.id, SESSION.secret, Identity(i.client, i.round + 1, i.model)),
        Session(SESSION.id, SESSION.secret, Identity(i.client, i.round, bytes(8))),
        Session(SESSION.id, bytes(32), i),
        Session(bytes(8), SESSION.secret, i),
    ]
    assert [Opener(other, UP).open(data) for other in others] == [Drop.FORGED] * len(others)
    assert Opener(SESSION, DOWN).open(data) is Drop.FORGED


def test_every_bit_is_authenticated():
    data = Sealer(SESSION, UP, 5).seal(1, b"hello")
    opener = Opener(SESSION, UP)
    for bit in range(8 * len(data)):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        # A lookup by session comes first: those bits are not of this session then.
        assert opener.open(bytes(broken)) is Drop.FORGED, bit
    assert isinstance(opener.open(data), Opened)


def test_replays_are_dropped_in_any_order():
    rng = np.random.default_rng(0)
    sealer, opener = Sealer(SESSION, UP, 5), Opener(SESSION, UP)
    sent = [sealer.seal(1, b"x") for _ in range(300)]
    order = rng.permutation(300)
    assert all(isinstance(opener.open(sent[i]), Opened) for i in order)
    assert all(opener.open(sent[i]) is Drop.REPLAYED for i in rng.permutation(300))


def test_what_is_overtaken_by_a_whole_window_is_dropped():
    sealer, opener = Sealer(SESSION, UP, 5), Opener(SESSION, UP)
    old, edge = sealer.seal(1, b"x"), sealer.seal(1, b"x")
    sealer.counter = WINDOW
    opener.open(sealer.seal(1, b"x"))
    assert opener.open(old) is Drop.REPLAYED
    assert opener.open(edge) == Opened(1, 5, 1, b"x", newest=False)
    assert opener.open(edge) is Drop.REPLAYED


def test_a_far_counter_costs_no_memory():
    sealer, opener = Sealer(SESSION, UP, 5), Opener(SESSION, UP)
    opener.open(sealer.seal(1, b"x"))
    sealer.counter = (1 << 48) - 1
    assert isinstance(opener.open(sealer.seal(1, b"x")), Opened)
    assert opener._seen.bit_length() <= WINDOW
    with pytest.raises(SafariError, match="a session must send fewer than 281474976710656 datagrams"):
        sealer.seal(1, b"x")


def test_a_client_that_begins_again_is_heard_and_its_old_datagrams_are_not():
    opener = Opener(SESSION, UP)
    first, second = Sealer(SESSION, UP, 5), Sealer(SESSION, UP, 6)
    old = [first.seal(1, b"x") for _ in range(3)]
    opener.open(old[0])
    assert opener.open(second.seal(1, b"y")) == Opened(1, 6, 0, b"y", newest=True)
    assert opener.open(old[2]) is Drop.REPLAYED


def test_foreign_datagrams_are_recognised_by_their_first_bytes():
    data = Sealer(SESSION, UP, 5).seal(1, b"hello")
    assert session_of(data[:36]) is Drop.TRUNCATED
    assert session_of(data + bytes(1500)) is Drop.OVERSIZED
    assert session_of(b"\xb0" + data[1:]) is Drop.FOREIGN


@pytest.mark.parametrize(
    ("session", "secret", "problem"),
    [
        (b"short", bytes(32), "session's id must be 8 bytes, got 5"),
        (bytes(8), bytes(31), "session's secret must be 32 bytes, got 31"),
        ("text", bytes(32), "session's id must be 8 bytes, got str"),
    ],
)
def test_wrong_sessions_are_refused(session, secret, problem):
    with pytest.raises(SafariError, match=problem):
        Session(session, secret, SESSION.identity)


def test_a_secret_is_not_printed():
    assert SESSION.secret.hex() not in repr(SESSION)
    assert repr(SESSION.secret) not in repr(SESSION)


def test_an_epoch_must_fit():
    with pytest.raises(SafariError, match="epoch must be 0 to 281474976710655, got -1"):
        Sealer(SESSION, UP, -1)
