"""Which client, round and model a frame or packet belongs to, stated in it and compared on arrival."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from safari.errors import SafariError, WireError
from safari.wire.bits import Reader, varint
from safari.wire.shared import DIGEST_BYTES

MAX_ROUND = (1 << 32) - 1
ROUND_BYTES = 4
# Packets have little room: they state the first bytes of the client's digest; the checksum covers the rest.
TAG_BYTES = 4


class IdentityError(WireError):
    """A valid message that belongs to another client, round or model, or that does not say.

    `what` is "client", "round", "model" or "identity" (none is stated, or one that was not asked for).
    """

    def __init__(self, what: str, problem: str, offset: int):
        self.what = what
        super().__init__(problem, offset)


@dataclass(frozen=True)
class Label:
    """An identity as it is stated on the wire.

    In a frame `client` and `model` are digests of 8 bytes; in a packet `client` is the first 4 bytes of the
    digest and `model` is empty.
    """

    client: bytes
    round: int
    model: bytes


@dataclass(frozen=True)
class Identity:
    """Which upload (or broadcast) a message is part of.

    It guards against stale and misrouted messages, not against forgery: whoever can send can state any
    identity, so authenticate the sender where that matters.

    Args:
        client: The client's name; any text. For a broadcast, a name of the server's own.
        round: The round, counted from 0, below 2**32.
        model: `reference_digest` of the global model that the round began with: tells apart two runs, or a
            run and its continuation from an older checkpoint, that use the same names and rounds.

    >>> Identity("client 7", 12, bytes(8)).label.client.hex()
    'f5093068aa4bfb43'
    """

    client: str
    round: int
    model: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.round <= MAX_ROUND:
            raise SafariError(f"identity's round must be 0 to {MAX_ROUND}, got {self.round}")
        if len(self.model) != DIGEST_BYTES:
            raise SafariError(
                f"identity's model must be a digest of {DIGEST_BYTES} bytes, got {self.model!r}"
            )

    @cached_property
    def label(self) -> Label:
        """Label that a frame states."""
        client = hashlib.sha256(self.client.encode("utf-8", "surrogatepass")).digest()[:DIGEST_BYTES]
        return Label(client, self.round, self.model)

    @cached_property
    def packet_key(self) -> Label:
        """Label that a packet states, equal to `packet_label` of this identity's packets."""
        return Label(self.label.client[:TAG_BYTES], self.round, b"")

    @cached_property
    def header(self) -> bytes:
        """The 20 bytes of a frame: client, round, model."""
        return self.label.client + self.round.to_bytes(ROUND_BYTES, "little") + self.model

    @cached_property
    def packet_header(self) -> bytes:
        """The 5 to 9 bytes of a packet: the start of the client's digest, and the round."""
        return self.label.client[:TAG_BYTES] + varint(self.round)

    def context(self, plain: bytes) -> bytes:
        """The context of a packet with this identity, from the one it would have without."""
        return hashlib.sha256(plain + self.header).digest()[: len(plain)]


def read_label(reader: Reader) -> Label:
    """The identity in the head of a frame."""
    client = bytes(reader.take(DIGEST_BYTES, "client digest"))
    number = int.from_bytes(reader.take(ROUND_BYTES, "round"), "little")
    return Label(client, number, bytes(reader.take(DIGEST_BYTES, "model digest")))


def read_packet_label(reader: Reader) -> Label:
    """The identity in the head of a packet."""
    client = bytes(reader.take(TAG_BYTES, "client tag"))
    return Label(client, reader.varint("round", MAX_ROUND), b"")


def check_identity(stated: Label | None, expect: Identity | None, offset: int) -> None:
    """Raise unless the message states the expected identity; without an expectation anything will do."""
    if expect is None:
        return
    if stated is None:
        raise IdentityError("identity", f"identity must be stated, of client {expect.client!r}", offset)
    ours = expect.label
    if stated.client != ours.client[: len(stated.client)]:
        wanted = ours.client[: len(stated.client)].hex()
        problem = f"client must be {wanted} ({expect.client!r}), got {stated.client.hex()}"
        raise IdentityError("client", problem, offset)
    if stated.round != ours.round:
        raise IdentityError("round", f"round must be {ours.round}, got {stated.round}", offset)
    if stated.model != ours.model[: len(stated.model)]:
        problem = f"model must be {ours.model.hex()}, got {stated.model.hex()}"
        raise IdentityError("model", problem, offset)
