"""Offer to a client over the control channel, for one round: address, secret and deadline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from safari.errors import SafariError
from safari.net.fec import Shape
from safari.net.seal import Session
from safari.wire.identity import Identity

LONGEST_DEADLINE = 30 * 24 * 3600.0


@dataclass(frozen=True)
class Offer:
    """A session as plain values, to travel in an encrypted message to this client alone.

    Args:
        host: Where the server receives datagrams: a name or an address.
        port: Likewise.
        session: The session's id.
        secret: Its secret, used for nothing else.
        client: The name under which the server knows this client.
        round: The round, counted from 0.
        model: `reference_digest` of the model that the round begins with.
        size: Bytes of the broadcast.
        digest: Its SHA-256.
        deadline: Seconds from the receipt of this offer to the end of the round.
        rate: Bytes a second that the client may send; 0: it learns its rate.

    >>> offer = Offer("127.0.0.1", 9100, bytes(8), bytes(32), "3", 0, bytes(8), 1000, bytes(32), 60.0)
    >>> Offer.read(offer.plain()) == offer
    True
    """

    host: str
    port: int
    session: bytes
    secret: bytes = field(repr=False)
    client: str
    round: int
    model: bytes
    size: int
    digest: bytes
    deadline: float
    rate: float = 0.0

    def __post_init__(self) -> None:
        wanted = {"str": str, "int": int, "bytes": bytes, "float": (int, float)}
        for part in fields(self):
            value = getattr(self, part.name)
            kind = wanted[str(part.type)]
            if not isinstance(value, kind) or isinstance(value, bool):  # type: ignore[arg-type]
                raise SafariError(f"offer's {part.name} must be {part.type}, got {type(value).__name__}")
        if not 1 <= self.port <= 65535:
            raise SafariError(f"offer's port must be 1 to 65535, got {self.port}")
        if not 0 < self.deadline <= LONGEST_DEADLINE:
            raise SafariError(
                f"offer's deadline must be above 0 and at most {LONGEST_DEADLINE:g} s, got {self.deadline}"
            )
        if not (self.rate >= 0 and math.isfinite(self.rate)):
            raise SafariError(f"offer's rate must be at least 0, got {self.rate}")
        # Each checks its own parts.
        _ = self.open(), self.shape

    def open(self) -> Session:
        """The session."""
        return Session(self.session, self.secret, Identity(self.client, self.round, self.model))

    @property
    def shape(self) -> Shape:
        """The broadcast's shape."""
        return Shape(self.size, self.digest)

    def plain(self) -> dict[str, str | int | float | bytes]:
        """The offer as a table of plain values."""
        return asdict(self)

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Offer:
        """An offer from such a table; SafariError names what is missing or wrong."""
        lacking = [part.name for part in fields(cls) if part.name not in table and part.name != "rate"]
        if lacking:
            raise SafariError(f"the offer must hold {', '.join(lacking)}")
        return cls(**{part.name: table[part.name] for part in fields(cls) if part.name in table})
