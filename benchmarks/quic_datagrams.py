"""QUIC datagrams (aioquic, RFC 9221) or UDP with AES-GCM? What each delivers over a link that loses packets.

Both are driven in memory and in virtual time over the same lossy paths, so the numbers are free of kernels
and machines, except the CPU time. The questions:

1. Why did a first probe of aioquic with a constant window deliver 57% of the datagrams through a relay that
   drops 30% of all UDP packets, and 19% at 60%?
2. How long does it take until a datagram counts, with the handshake and the client's proof on a stream?
3. How much is delivered by a deadline, counted from the start of the round?
4. What does it cost in CPU time?

    pip install aioquic
    python benchmarks/quic_datagrams.py --out results/net/quic.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import ssl
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path as File

import numpy as np
from aioquic.buffer import Buffer
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.congestion.base import QuicCongestionControl, register_congestion_control
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import pull_quic_header
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from safari.net.channel import Channel
from safari.net.pace import Pacing
from safari.net.path import Conditions, Path
from safari.net.seal import DOWN, UP, Counts, Session
from safari.wire.identity import Identity

SIZE = 1104
LOSSES = (0.0, 0.1, 0.3, 0.6)
NEVER = 1e9


class Window(QuicCongestionControl):
    """A window that never changes; packets leave it when they are acknowledged or declared lost."""

    size = 100_000

    def __init__(self, *, max_datagram_size: int):
        super().__init__(max_datagram_size=max_datagram_size)
        self.congestion_window = self.size

    def on_packet_sent(self, *, packet) -> None:
        self.bytes_in_flight += packet.sent_bytes

    def on_packet_acked(self, *, now, packet) -> None:
        self.bytes_in_flight -= packet.sent_bytes

    def on_packets_expired(self, *, packets) -> None:
        self.bytes_in_flight -= sum(packet.sent_bytes for packet in packets)

    def on_packets_lost(self, *, now, packets) -> None:
        self.bytes_in_flight -= sum(packet.sent_bytes for packet in packets)

    def on_persistent_congestion(self) -> None: ...

    def on_rtt_measurement(self, *, now, rtt) -> None: ...


register_congestion_control("constant window", Window)


def certificate():
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    begin = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    begin = begin.serial_number(1).not_valid_before(now - day).not_valid_after(now + day)
    return begin.sign(key, hashes.SHA256()), key


CERTIFICATE = certificate()


def settings(is_client: bool) -> QuicConfiguration:
    found = QuicConfiguration(
        is_client=is_client,
        verify_mode=ssl.CERT_NONE,
        max_datagram_frame_size=65536,
        congestion_control_algorithm="constant window",
        idle_timeout=300,
    )
    if not is_client:
        found.certificate, found.private_key = CERTIFICATE
    return found


class Quic:
    """A client and a server of aioquic over two lossy paths; the client sends `count` datagrams.

    `confirmed`: not before the server has answered on a stream, which is where a client would prove its
    secret; otherwise as soon as the client's own side of the handshake is done. `every`: seconds between
    two of them; 0: all are handed over at once.
    """

    def __init__(self, loss, delay, seed, *, count=0, window=100_000, confirmed=True, every=0.0):
        Window.size = window
        self.paths = [
            Path(Conditions(loss=loss, delay=delay), np.random.default_rng([seed, k])) for k in (0, 1)
        ]
        self.client, self.server = QuicConnection(configuration=settings(True)), None
        self.left, self.every, self.confirmed = count, every, confirmed
        self.now, self.next_at = 0.0, None
        self.count, self.arrivals = count, []
        self.handshake = self.ready = self.server_ready = None
        # Datagrams of the client that reached the server before it could read them.
        self.too_early = 0

    def run(self, until: float) -> Quic:
        self.client.connect(("server", 1), now=0.0)
        for _ in range(300_000):
            self._send()
            times = [t for path in self.paths if (t := path.next_time()) is not None]
            times += [t for end in self._ends() if (t := end.get_timer()) is not None]
            times += [self.next_at] if self.next_at is not None and self.left else []
            following = min(times, default=until)
            if following >= until or (not self.count and self.ready is not None):
                return self
            self.now = max(self.now + 1e-7, following)
            self._receive()
        raise RuntimeError("the two ends keep each other busy for ever")

    def _ends(self):
        return [end for end in (self.client, self.server) if end is not None]

    def _send(self) -> None:
        if self.next_at is not None and self.left and self.now >= self.next_at:
            for _ in range(1 if self.every else self.left):
                self.client.send_datagram_frame(bytes(SIZE))
                self.left -= 1
            self.next_at = self.now + self.every
        for end, path in zip((self.client, self.server), self.paths, strict=True):
            if end is not None:
                for data, _ in end.datagrams_to_send(now=self.now):
                    path.send(data, self.now)

    def _receive(self) -> None:
        for data, _ in self.paths[0].due(self.now):
            if self.server is None:
                head = pull_quic_header(Buffer(data=data), host_cid_length=8)
                self.server = QuicConnection(
                    configuration=settings(False), original_destination_connection_id=head.destination_cid
                )
            # A short header: application data.
            self.too_early += self.server_ready is None and not data[0] & 0x80 and len(data) > SIZE
            self.server.receive_datagram(data, ("client", 1), now=self.now)
        for data, _ in self.paths[1].due(self.now):
            self.client.receive_datagram(data, ("server", 1), now=self.now)
        for end in self._ends():
            if (at := end.get_timer()) is not None and at <= self.now:
                end.handle_timer(now=self.now)
        while (event := self.client.next_event()) is not None:
            self._client_event(event)
        while self.server is not None and (event := self.server.next_event()) is not None:
            self._server_event(event)

    def _client_event(self, event) -> None:
        if isinstance(event, events.HandshakeCompleted):
            self.handshake = self.now
            if self.confirmed:
                self.client.send_stream_data(0, bytes(32), end_stream=True)
            else:
                self.next_at = self.now
        elif isinstance(event, events.StreamDataReceived) and self.ready is None:
            self.ready = self.next_at = self.now

    def _server_event(self, event) -> None:
        if isinstance(event, events.HandshakeCompleted):
            self.server_ready = self.now
        elif isinstance(event, events.StreamDataReceived):
            self.server.send_stream_data(0, b"ok", end_stream=True)
        elif isinstance(event, events.DatagramFrameReceived):
            self.arrivals.append(self.now)


def sealed(loss, delay, seed, *, count, every) -> list[float]:
    """Arrival times of `count` datagrams of ours, sent from the start: the secret came with the round."""
    path = Path(Conditions(loss=loss, delay=delay), np.random.default_rng([seed, 0]))
    client, server, counts = *ends(), Counts()
    server.counts = counts
    arrivals = []
    for i in range(count):
        path.send(client.data(bytes(SIZE), i * every), i * every)
    while (at := path.next_time()) is not None:
        for data, _ in path.due(at):
            if server.receive(data, at) is not None:
                arrivals.append(at)
    return arrivals


def ends() -> tuple[Channel, Channel]:
    session, pacing = Session.fresh(Identity("client", 0, bytes(8))), Pacing(rate=1e9)
    options = {"now": 0.0, "pacing": pacing, "counts": Counts()}
    return (
        Channel(session, out=UP, back=DOWN, epoch=1, **options),
        Channel(session, out=DOWN, back=UP, epoch=2, **options),
    )


def why(seeds: int) -> list[dict]:
    """500 datagrams at once, 10 ms one way: the share that counted, and what came too early to be read."""
    rows = []
    for loss in LOSSES:
        for window in (30_000, 100_000, 300_000, 10_000_000):
            for confirmed in (False, True):
                found = [
                    Quic(loss, 0.01, s, count=500, window=window, confirmed=confirmed).run(60)
                    for s in range(seeds)
                ]
                delivered = [len(q.arrivals) / 500 for q in found]
                early = [q.too_early / 500 for q in found]
                rows.append(
                    {
                        "loss": loss, "window": window, "confirmed": confirmed,
                        "delivered": mean(delivered), "std": statistics.pstdev(delivered),
                        "arrived_before_the_handshake_was_done": mean(early),
                        "connections_without_any": sum(d == 0 for d in delivered),
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def until_it_counts(seeds: int) -> list[dict]:
    """Seconds from the start of a connection until the server has confirmed the client's proof."""
    rows = []
    for delay in (0.02, 5.0):
        for loss in LOSSES:
            times = sorted(Quic(loss, delay, s).run(300).ready or NEVER for s in range(seeds))
            rows.append(
                {
                    "delay": delay, "loss": loss, "median": times[len(times) // 2],
                    "p90": _finite(times[int(0.9 * len(times))]),
                    "none_in_300_s": sum(t == NEVER for t in times),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def by_the_deadline(seeds: int, deadlines=(0.5, 1.0, 2.0, 5.0, 10.0, 30.0)) -> list[dict]:
    """90 datagrams, one each millisecond, 20 ms one way: the share that counts by a deadline."""
    rows = []
    for loss in LOSSES:
        options = {"count": 90, "every": 0.001}
        ways: dict[str, Callable[[int], list[float]]] = {
            "quic": lambda s: Quic(loss, 0.02, s, window=10_000_000, **options).run(40).arrivals,
            "sealed": lambda s: sealed(loss, 0.02, s, **options),
        }
        for way, arrivals in ways.items():
            found = [arrivals(s) for s in range(seeds)]
            shares = {f"{d:g}": mean([sum(t <= d for t in ts) / 90 for ts in found]) for d in deadlines}
            rows.append({"way": way, "loss": loss, "by": shares})
            print(rows[-1], flush=True)
    return rows


def cpu(count: int = 4000, tries: int = 7) -> dict[str, float]:
    """Seconds of CPU for each MB from a client to a server, both ends, without sockets: the best of some."""

    def quic() -> int:
        return len(Quic(0.0, 0.01, 0, count=count, window=10_000_000, every=0.0002).run(30).arrivals)

    def ours() -> int:
        return len(sealed(0.0, 0.01, 0, count=count, every=0.0002))

    best = {"quic": NEVER, "sealed": NEVER}
    for _ in range(tries):
        for name, way in (("quic", quic), ("sealed", ours)):
            start = time.process_time()
            assert way() == count
            best[name] = min(best[name], (time.process_time() - start) / (count * SIZE / 1e6))
    return best | {"ratio": best["quic"] / best["sealed"]}


def mean(values: list[float]) -> float:
    return round(statistics.fmean(values), 4)


def _finite(value: float) -> float | None:
    return None if value == NEVER else value


PARTS = {"why": why, "until_it_counts": until_it_counts, "by_the_deadline": by_the_deadline}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--only", choices=[*PARTS, "cpu_seconds_per_mb"], help="one of the questions")
    parser.add_argument("--out", type=File)
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    found["versions"] = {name: version(name) for name in ("aioquic", "cryptography")}
    found["versions"]["python"] = platform.python_version()
    for name, part in PARTS.items():
        if args.only in (None, name):
            found[name] = part(args.seeds)
            found["seeds"] = args.seeds
    if args.only in (None, "cpu_seconds_per_mb"):
        found["cpu_seconds_per_mb"] = cpu()
        print(found["cpu_seconds_per_mb"])
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
