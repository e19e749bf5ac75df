"""Forward error correction for the broadcast: RaptorQ (RFC 6330), any sufficient number of symbols will do.

A message is cut into chunks of at most `CHUNK` bytes, and each chunk into symbols of `SYMBOL` bytes. From K
source symbols come as many encoded ones as are wanted, and nearly any K of those give the chunk back (K + 2
with a probability of 1 − 256⁻³). A symbol travels as

    2 bytes chunk | 3 bytes number of the symbol | SYMBOL bytes

Symbols must be authentic before they get here: one wrong symbol among thousands decodes to wrong bytes. So
the message is compared with its digest, too.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from safari.errors import MissingExtraError, SafariError

try:
    import raptorq
except ImportError as error:
    raise MissingExtraError("raptorq", "net", "broadcasts") from error

SYMBOL = 1152
HEAD_BYTES = 5
# One source block of RFC 6330, and quick to decode.
CHUNK = 4_000_000
MOST_CHUNKS = 256
DIGEST_BYTES = 32
# Symbols that a client asks for beyond the number that may be enough.
SPARE = 2
_MOST_SYMBOLS = 1 << 24


@dataclass(frozen=True)
class Shape:
    """Length and SHA-256 of a message, which a receiver has to know beforehand.

    >>> shape = Shape.of(bytes(2500))
    >>> shape.chunks, shape.symbols
    ((2500,), (3,))
    """

    size: int
    digest: bytes

    def __post_init__(self) -> None:
        most = CHUNK * MOST_CHUNKS
        if not 1 <= self.size <= most:
            raise SafariError(f"a broadcast must hold 1 to {most} bytes, got {self.size}")
        if len(self.digest) != DIGEST_BYTES:
            raise SafariError(f"a broadcast's digest must be {DIGEST_BYTES} bytes, got {len(self.digest)}")

    @classmethod
    def of(cls, message: bytes) -> Shape:
        """The shape of a message."""
        return cls(len(message), hashlib.sha256(message).digest())

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """The bytes of each chunk, as equal as can be."""
        count = -(-self.size // CHUNK)
        edges = [self.size * i // count for i in range(count + 1)]
        return tuple(b - a for a, b in pairwise(edges))

    @cached_property
    def symbols(self) -> tuple[int, ...]:
        """The source symbols of each chunk."""
        return tuple(-(-size // SYMBOL) for size in self.chunks)


class Source:
    """A message as symbols, as many as are wanted."""

    def __init__(self, message: bytes):
        self.shape = Shape.of(message)
        starts = [sum(self.shape.chunks[:i]) for i in range(len(self.shape.chunks))]
        self._encoders = [
            raptorq.Encoder.with_defaults(message[start : start + size], SYMBOL)
            for start, size in zip(starts, self.shape.chunks, strict=True)
        ]
        self._ready: list[list[bytes]] = [encoder.get_encoded_packets(0) for encoder in self._encoders]

    def symbol(self, chunk: int, number: int) -> bytes:
        """A symbol as it travels: the first ones are the message itself, the others repair it."""
        ready = self._ready[chunk]
        if number >= len(ready):
            # Twice as many each time: a link that loses most needs several times the message.
            wanted = min(max(number + 1, 2 * len(ready)), _MOST_SYMBOLS)
            repair = wanted - self.shape.symbols[chunk]
            ready = self._ready[chunk] = self._encoders[chunk].get_encoded_packets(repair)
        # The library's own first byte is the source block: always 0 in chunks of this size.
        return chunk.to_bytes(2, "little") + ready[number][1:]


class Sink:
    """Authentic symbols put together."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self._decoders = [raptorq.Decoder.with_defaults(size, SYMBOL) for size in shape.chunks]
        self._numbers: list[set[int]] = [set() for _ in shape.chunks]
        self._chunks: list[bytes | None] = [None] * len(shape.chunks)
        self.message: bytes | None = None

    @property
    def received(self) -> int:
        """Number of different symbols received."""
        return sum(map(len, self._numbers))

    def missing(self) -> tuple[int, ...]:
        """Number of further symbols that each chunk needs; 0 where it is complete."""
        wanted = zip(self.shape.symbols, self._numbers, self._chunks, strict=True)
        return tuple(0 if done is not None else max(1, k + SPARE - len(have)) for k, have, done in wanted)

    def add(self, body: bytes) -> bool:
        """Take a symbol; False where it is none of this message."""
        if len(body) != HEAD_BYTES + SYMBOL:
            return False
        chunk = int.from_bytes(body[:2], "little")
        if chunk >= len(self._chunks):
            return False
        number = int.from_bytes(body[2:HEAD_BYTES], "big")
        if self._chunks[chunk] is not None or number in self._numbers[chunk]:
            return True
        self._numbers[chunk].add(number)
        self._chunks[chunk] = self._decoders[chunk].decode(b"\0" + body[2:])
        if self._chunks[chunk] is not None and None not in self._chunks:
            self._finish()
        return True

    def _finish(self) -> None:
        message = b"".join(chunk or b"" for chunk in self._chunks)
        if hashlib.sha256(message).digest() != self.shape.digest:
            raise SafariError("the broadcast's digest must be that of the round's message: it is not")
        self.message = message
