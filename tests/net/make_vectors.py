"""Writes tests/vectors/net: datagrams whose bytes must never change. Run it only to add new ones.

python tests/net/make_vectors.py
"""

from __future__ import annotations

from pathlib import Path

from safari.net.channel import Channel
from safari.net.fec import Source
from safari.net.pace import Pacing
from safari.net.seal import DOWN, UP, Counts, Session
from safari.wire.identity import Identity

FOLDER = Path(__file__).parent.parent / "vectors" / "net"
SESSION = Session(bytes(range(8)), bytes(range(100, 132)), Identity("client 7", 12, bytes(range(50, 58))))
EPOCH = 1_700_000_000_000
MESSAGE = bytes(i * i % 251 for i in range(3000))


def channel(out: str, back: str, epoch: int = EPOCH) -> Channel:
    return Channel(
        SESSION, out=out, back=back, epoch=epoch, now=10.0, pacing=Pacing(rate=1e6), counts=Counts()
    )


def datagrams() -> dict[str, bytes]:
    """Every golden datagram by name."""
    client, server = channel(UP, DOWN), channel(DOWN, UP)
    source = Source(MESSAGE)
    found = {"ask": client.report(False, (5,), padded=True)}
    found["symbol-0"] = server.data(source.symbol(0, 0), 10.02)
    found["symbol-repair"] = server.data(source.symbol(0, 4), 10.03)
    client.receive(found["symbol-0"], 10.05)
    client.receive(found["symbol-repair"], 10.06)
    found["report"] = client.report(True, (0,))
    found["packet"] = client.data((3).to_bytes(2, "little") + (9).to_bytes(2, "little") + b"packet", 10.5)
    server.receive(found["packet"], 10.53)
    found["answer"] = server.report()
    return found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, data in datagrams().items():
        (FOLDER / f"{name}.bin").write_bytes(data)
