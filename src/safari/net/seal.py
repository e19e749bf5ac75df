"""Sealed datagrams: AES-256-GCM under keys of one client, one round, one model and one direction.

A datagram is

    offset  bytes  field
    0       1      0xA0 | kind
    1       8      session: which keys; random, not secret
    9       6      epoch: when the sending process began, in milliseconds
    15      6      counter: rises by one with each datagram of that process
    21      n      ciphertext
    21 + n  16     tag

with the first 21 bytes as associated data and bytes 9 to 20 as the nonce. A session lasts for one round of
one client, its secret is handed out once through the control channel, and each direction has a key of its
own, so a nonce repeats only if two processes begin in the same millisecond with the same secret. The key is
derived from the identity as well: a datagram of another client, round or model does not authenticate.

Numbers are little-endian.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from safari.errors import MissingExtraError, SafariError
from safari.wire.identity import Identity

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise MissingExtraError("cryptography", "net", "datagrams") from error

MAGIC = 0xA0
SESSION_BYTES = 8
SECRET_BYTES = 32
EPOCH_AT, COUNTER_AT, BODY_AT = 9, 15, 21
TAG_BYTES = 16
OVERHEAD = BODY_AT + TAG_BYTES
# The largest UDP payload that we send. It fits an IPv6 path of the least MTU, 1280 bytes.
DATAGRAM = 1200
# The largest that is looked at: an Ethernet frame's worth.
LONGEST = 1500
COUNTER_LIMIT = 1 << 48
# How far a datagram may be overtaken by later ones and still be accepted.
WINDOW = 4096

UP, DOWN = "up", "down"


class Drop(StrEnum):
    """Why a datagram was dropped; in the order of the checks, all but the last three before decryption."""

    TRUNCATED = "truncated"
    OVERSIZED = "oversized"
    FOREIGN = "foreign"
    STALE = "stale"
    REPLAYED = "replayed"
    FORGED = "forged"
    MALFORMED = "malformed"
    UNWANTED = "unwanted"


@dataclass
class Counts:
    """Datagrams received by one end: how many were accepted, and how many dropped for which reason."""

    accepted: int = 0
    dropped: dict[Drop, int] = field(default_factory=lambda: dict.fromkeys(Drop, 0))

    def drop(self, reason: Drop) -> None:
        """Count one that was dropped."""
        self.dropped[reason] += 1

    def note(self, reason: Drop | None) -> None:
        """Count one that was dropped for this reason, or accepted."""
        if reason is None:
            self.accepted += 1
        else:
            self.dropped[reason] += 1

    @property
    def total(self) -> int:
        """All that were received."""
        return self.accepted + sum(self.dropped.values())


@dataclass(frozen=True)
class Session:
    """Parameters of both ends for the datagrams of one round: from the control channel, to this client alone.

    Args:
        id: Eight bytes that stand in each datagram.
        secret: 32 random bytes, used for this session only.
        identity: Whose round it is, and the digest of the model it began with.
    """

    id: bytes
    secret: bytes = field(repr=False)
    identity: Identity

    def __post_init__(self) -> None:
        for name, value, size in (("id", self.id, SESSION_BYTES), ("secret", self.secret, SECRET_BYTES)):
            if not isinstance(value, bytes) or len(value) != size:
                raise SafariError(f"session's {name} must be {size} bytes, got {_length(value)}")

    @classmethod
    def fresh(cls, identity: Identity, random: Callable[[int], bytes] = os.urandom) -> Session:
        """A new session; `random(n)` returns n random bytes."""
        return cls(random(SESSION_BYTES), random(SECRET_BYTES), identity)

    def key(self, direction: str) -> bytes:
        """The key of the datagrams that go "up" to the server or "down" from it."""
        info = b"safari net 1 " + direction.encode() + self.identity.header
        return HKDF(SHA256(), 32, salt=self.id, info=info).derive(self.secret)


class Sealer:
    """The sending side of a session's direction."""

    def __init__(self, session: Session, direction: str, epoch: int):
        if not 0 <= epoch < COUNTER_LIMIT:
            raise SafariError(f"epoch must be 0 to {COUNTER_LIMIT - 1}, got {epoch}")
        self._aead = AESGCM(session.key(direction))
        self._session = session.id
        self._epoch = epoch.to_bytes(COUNTER_AT - EPOCH_AT, "little")
        self.counter = 0

    def seal(self, kind: int, body: bytes) -> bytes:
        """The next datagram; its counter is the one that `counter` had before the call."""
        if self.counter >= COUNTER_LIMIT:
            raise SafariError(f"a session must send fewer than {COUNTER_LIMIT} datagrams")
        nonce = self._epoch + self.counter.to_bytes(BODY_AT - COUNTER_AT, "little")
        self.counter += 1
        head = bytes([MAGIC | kind]) + self._session + nonce
        return head + self._aead.encrypt(nonce, body, head)


@dataclass(frozen=True)
class Opened:
    """An authentic datagram: its kind, its place in the sender's order, its body.

    `newest`: nothing authentic and later has arrived before, so that its address is the sender's latest.
    """

    kind: int
    epoch: int
    counter: int
    body: bytes
    newest: bool


class Opener:
    """The receiving side of a session's direction: authentic datagrams, each once."""

    def __init__(self, session: Session, direction: str):
        self._aead = AESGCM(session.key(direction))
        self._epoch = -1
        self._highest = -1
        # Bit i: the datagram with the counter `_highest - i` has been accepted.
        self._seen = 0

    @property
    def highest(self) -> int:
        """The highest counter accepted from the sender's latest process, -1 before the first."""
        return self._highest

    def open(self, data: bytes) -> Opened | Drop:
        """Decrypt a datagram with a header of this session, or say why it is dropped."""
        epoch = int.from_bytes(data[EPOCH_AT:COUNTER_AT], "little")
        counter = int.from_bytes(data[COUNTER_AT:BODY_AT], "little")
        if self._is_replay(epoch, counter):
            return Drop.REPLAYED
        try:
            body = self._aead.decrypt(data[EPOCH_AT:BODY_AT], data[BODY_AT:], data[:BODY_AT])
        except InvalidTag:
            return Drop.FORGED
        newest = epoch > self._epoch or counter > self._highest
        self._accept(epoch, counter)
        return Opened(data[0] & 0x0F, epoch, counter, body, newest)

    def _is_replay(self, epoch: int, counter: int) -> bool:
        if epoch != self._epoch:
            return epoch < self._epoch
        behind = self._highest - counter
        return behind >= WINDOW or (behind >= 0 and bool(self._seen >> behind & 1))

    def _accept(self, epoch: int, counter: int) -> None:
        if epoch > self._epoch:
            self._epoch, self._highest, self._seen = epoch, counter, 1
        elif counter > self._highest:
            # A shift beyond the window leaves nothing; it must not make a number of 2^48 bits.
            ahead = min(counter - self._highest, WINDOW)
            self._seen = (self._seen << ahead | 1) & (1 << WINDOW) - 1
            self._highest = counter
        else:
            self._seen |= 1 << self._highest - counter


def session_of(data: bytes) -> bytes | Drop:
    """The session that a datagram names, or why it cannot be one of ours.

    >>> session_of(b"hello")
    <Drop.TRUNCATED: 'truncated'>
    """
    if len(data) < OVERHEAD:
        return Drop.TRUNCATED
    if len(data) > LONGEST:
        return Drop.OVERSIZED
    if data[0] & 0xF0 != MAGIC:
        return Drop.FOREIGN
    return data[1 : 1 + SESSION_BYTES]


def _length(value: object) -> str:
    return f"{len(value)}" if isinstance(value, bytes) else type(value).__name__
