"""Models in datagrams and over a stream, for many clients, on a link that loses packets and takes 20 ms each way.

Server and clients are two processes in network namespaces of their own, joined by a relay in this process that
passes IP packets between two TUN devices, loses some of them and holds the others back. So the kernel's TCP and our
datagrams meet the same link. The stream is TLS over TCP with one connection a client, all connected before the
packets begin to get lost. It stands for Flower's own stream (HTTP over TLS over TCP), of which several hundred
SuperNodes do not fit on a small machine; a new connection for each message would only be slower.

    python benchmarks/net.py measure --out results/net/clients.json        (root: namespaces and TUN)
    python benchmarks/net.py draw results/net/clients.json docs/images/net.svg
    python benchmarks/net.py draw-packets results/net/packets.json docs/images/packets.svg

The last draws what `safari reproduce packets` has found.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import platform
import random
import select
import signal
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from safari.net.certificates import make_certificates
from safari.net.client import PACKET
from safari.net.fec import Source
from safari.net.offer import Offer
from safari.net.pace import Pacing
from safari.net.seal import Session
from safari.net.udp import ClientSocket, ServerSocket
from safari.wire.identity import Identity

SERVER, CLIENTS, PORT = "10.78.0.1", "10.78.0.2", 9000
LOSSES = (0.0, 0.05, 0.1, 0.3, 0.6)
TRANSPORTS = ("datagrams", "stream")
# Between two looks at what the server holds.
SAMPLE = 0.5
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


# --- the two ends


def sessions(count: int) -> list[Session]:
    """The same on both sides, instead of a control channel."""
    return [
        Session.fresh(Identity(str(i), 0, bytes(8)), np.random.default_rng([7, i]).bytes)
        for i in range(count)
    ]


def model_down(setting: dict[str, Any]) -> bytes:
    return np.random.default_rng(0).bytes(setting["down"])


def ready() -> float:
    """Tell the parent that this end is set up; returns the moment at which to begin."""
    print("ready", flush=True)
    return float(sys.stdin.readline())


def stopped() -> bool:
    """Has the parent asked for the end?"""
    return bool(select.select([sys.stdin], [], [], 0)[0])


class Book:
    """What the server holds, as time goes on, and what it cost."""

    def __init__(self, begin: float):
        self.begin, self.cpu, self.timeline = begin, time.process_time(), list[tuple[float, float]]()

    def note(self, share: float) -> None:
        self.timeline.append((round(time.monotonic() - self.begin, 2), round(share, 5)))

    def close(self, **found: Any) -> None:
        cpu = time.process_time() - self.cpu
        moved = (found["sent"] + found["received"]) / 1e6
        print(
            json.dumps({**found, "timeline": self.timeline, "server_cpu_s": cpu, "cpu_s_per_mb": cpu / moved})
        )


def serve_datagrams(setting: dict[str, Any]) -> None:
    count, packets = setting["clients"], -(-setting["up"] // PACKET)
    source = Source(model_down(setting))
    with ServerSocket(SERVER, PORT, pacing=Pacing(rate=setting["server_rate"] / count)) as server:
        own = sessions(count)
        for session in own:
            server.open(session, source, 10 * setting["up"])
        book = Book(ready())
        while time.monotonic() - book.begin < setting["deadline"] and not stopped():
            time.sleep(SAMPLE)
            book.note(sum(len(server.look(s.id).packets) for s in own) / (count * packets))
        uploads = [server.close(session.id) for session in own]
    book.close(
        sent=sum(u.bytes_sent for u in uploads),
        received=sum(u.bytes_received for u in uploads),
        informed=sum(u.informed for u in uploads) / count,
        delivered=sum(len(u.packets) for u in uploads) / (count * packets),
        whole=sum(u.complete for u in uploads) / count,
    )


async def join_datagrams(setting: dict[str, Any]) -> None:
    shape = Source(model_down(setting)).shape
    sizes = [PACKET] * (setting["up"] // PACKET) + (
        [setting["up"] % PACKET] if setting["up"] % PACKET else []
    )
    packets = [np.random.default_rng(i).bytes(size) for i, size in enumerate(sizes)]
    rate, deadline = setting["client_rate"], setting["deadline"]

    async def one(i: int, session: Session) -> None:
        offer = Offer(
            SERVER,
            PORT,
            session.id,
            session.secret,
            str(i),
            0,
            bytes(8),
            shape.size,
            shape.digest,
            deadline,
            rate,
        )
        with ClientSocket(offer, rng=np.random.default_rng(i)) as client:
            if isinstance(await client.receive_async(), bytes):
                await client.upload_async(packets)

    begin = ready()
    await asyncio.sleep(max(begin - time.monotonic(), 0))
    await asyncio.gather(*(one(i, session) for i, session in enumerate(sessions(setting["clients"]))))


async def serve_stream(setting: dict[str, Any]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Path(setting["folder"]) / "server.crt", Path(setting["folder"]) / "server.key")
    message, count, up = model_down(setting), setting["clients"], setting["up"]
    connected, go, held, informed = asyncio.Event(), asyncio.Event(), [0] * count, [False] * count
    tasks: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(tasks)
        tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        if len(tasks) == count:
            connected.set()
        await go.wait()
        with contextlib.suppress(OSError):
            writer.write(message)
            while data := await reader.read(65536):
                held[number] += len(data)
                informed[number] = True

    listener = await asyncio.start_server(answer, SERVER, PORT, ssl=context, backlog=count)
    # The parent is told when all are connected, which is when the clients say that they are ready.
    book = Book(await asyncio.get_running_loop().run_in_executor(None, ready))
    await connected.wait()
    await asyncio.sleep(max(book.begin - time.monotonic(), 0))
    go.set()
    while time.monotonic() - book.begin < setting["deadline"] and sum(held) < count * up:
        await asyncio.sleep(SAMPLE)
        book.note(sum(held) / (count * up))
    # Acknowledged bytes are not told to a program: what was sent is what was delivered, or is still in a buffer.
    whole = sum(n == up for n in held) / count
    sent = int(len(message) * max(sum(informed), 1))
    book.close(
        sent=sent,
        received=sum(held),
        informed=sum(informed) / count,
        delivered=sum(held) / (count * up),
        whole=whole,
    )
    sys.stdout.flush()
    listener.close()
    os._exit(0)


async def join_stream(setting: dict[str, Any]) -> None:
    context = ssl.create_default_context(cafile=str(Path(setting["folder"]) / "ca.crt"))
    upload = bytes(setting["up"])
    few = asyncio.Semaphore(20)

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with few:
            return await asyncio.open_connection(SERVER, PORT, ssl=context, ssl_handshake_timeout=120)

    pairs = await asyncio.gather(*(connect() for _ in range(setting["clients"])))

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readexactly(setting["down"])
            writer.write(upload)
            await writer.drain()
            await asyncio.sleep(setting["deadline"])

    ready()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*(one(*pair) for pair in pairs)), setting["deadline"] + 5)


# --- the link between them


def tun(namespace: str, address: str) -> int:
    """A TUN device in a namespace, up, with this address; the file descriptor that its packets go through."""
    found: list[Any] = []

    def make() -> None:
        with Path(f"/var/run/netns/{namespace}").open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", b"link0", _IFF_TUN | _IFF_NO_PI))
        found.append(fd)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    _ip("-n", namespace, "link", "set", "dev", "link0", "txqueuelen", "20000", "up")
    _ip("-n", namespace, "link", "set", "dev", "lo", "up")
    _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "link0")
    return int(found[0])


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=60)


class Wire(threading.Thread):
    """Passes IP packets between two devices, late; some it loses."""

    def __init__(self, one: int, other: int, delay: float, seed: int):
        super().__init__(daemon=True)
        self.ends, self.delay, self.loss, self.rng = (one, other), delay, 0.0, random.Random(seed)
        self.offered = self.lost = 0
        self.over = False

    def run(self) -> None:
        poll = select.poll()
        for fd in self.ends:
            poll.register(fd, select.POLLIN)
        other = {self.ends[0]: self.ends[1], self.ends[1]: self.ends[0]}
        waiting: deque[tuple[float, int, bytes]] = deque()
        while not self.over:
            pause = 100.0 if not waiting else max(0.0, 1000 * (waiting[0][0] - time.monotonic()))
            for fd, _ in poll.poll(min(pause, 100.0)):
                with contextlib.suppress(BlockingIOError):
                    for _ in range(64):
                        data = os.read(fd, 2048)
                        self.offered += 1
                        if self.rng.random() < self.loss:
                            self.lost += 1
                        else:
                            waiting.append((time.monotonic() + self.delay, other[fd], data))
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, fd, data = waiting.popleft()
                with contextlib.suppress(OSError):
                    os.write(fd, data)


def measure(setting: dict[str, Any], transport: str, loss: float) -> dict[str, Any]:
    """One transport at one loss."""
    name = f"sfn{os.getpid()}"
    names, ends, fds = [f"{name}{end}" for end in ("server", "clients")], [], []
    with tempfile.TemporaryDirectory() as folder:
        make_certificates(Path(folder), [SERVER])
        try:
            for namespace, address in zip(names, (SERVER, CLIENTS), strict=True):
                _ip("netns", "add", namespace)
                fds.append(tun(namespace, address))
            wire = Wire(fds[0], fds[1], setting["delay"], seed=int(100 * loss))
            wire.start()
            for role, namespace in zip(("server", "clients"), names, strict=True):
                command = [
                    sys.executable,
                    __file__,
                    "end",
                    role,
                    transport,
                    json.dumps({**setting, "folder": folder}),
                ]
                end = subprocess.Popen(
                    ["ip", "netns", "exec", namespace, *command],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
                )  # fmt: skip
                ends.append(end)
                if end.stdout is None or end.stdout.readline() != "ready\n":
                    raise SystemExit(f"the {role} of {transport} did not start")
            server, clients = ends
            wire.offered = wire.lost = 0
            wire.loss = loss
            begin = time.monotonic() + 0.5
            for end in ends:
                print(begin, file=end.stdin)
            if transport == "datagrams":
                clients.wait(setting["deadline"] + 60)
                # What the last client has sent is on its way.
                time.sleep(2 * setting["delay"] + 1.0)
                print("stop", file=server.stdin)
            text, _ = server.communicate(timeout=setting["deadline"] + 60)
            found = json.loads(text)
            wire.over = True
            wire.join()
            return {
                "transport": transport,
                "loss": loss,
                "lost": round(wire.lost / max(wire.offered, 1), 4),
                **found,
            }
        finally:
            for end in ends:
                end.kill()
                end.wait()
            for fd in fds:
                os.close(fd)
            for namespace in names:
                subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def seconds_to(timeline: list[list[float]], share: float) -> float | None:
    """When the server first held this share of all updates."""
    return next((t for t, held in timeline if held >= share), None)


def command_measure(args: argparse.Namespace) -> None:
    setting = {
        "clients": args.clients, "down": args.down, "up": args.up, "delay": args.delay, "deadline": args.deadline,
        "server_rate": args.server_rate, "client_rate": args.client_rate,
    }  # fmt: skip
    rows = []
    for loss in args.losses:
        for transport in TRANSPORTS:
            row = measure(setting, transport, loss)
            rows.append(row)
            short = {key: value for key, value in row.items() if key != "timeline"}
            print(
                {**short, "90% of what came": seconds_to(row["timeline"], 0.9 * row["delivered"])}, flush=True
            )
    found = {
        "setting": setting,
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()},
        "command": "python benchmarks/net.py measure --out results/net/clients.json",
        "rows": rows,
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n")


def command_draw(args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "safari"
    from matplotlib import pyplot as plt

    found = json.loads(args.file.read_text())
    rows, setting = found["rows"], found["setting"]
    losses = sorted({row["loss"] for row in rows})
    figure, panels = plt.subplots(
        1, len(losses), figsize=(2.3 * len(losses), 2.6), sharey=True, layout="constrained"
    )
    for panel, loss in zip(np.atleast_1d(panels), losses, strict=True):
        for transport, colour in zip(TRANSPORTS, ("#0b7285", "#c2410c"), strict=True):
            row = next(r for r in rows if r["loss"] == loss and r["transport"] == transport)
            times, shares = zip(*[(0.0, 0.0), *row["timeline"]], strict=True)
            label = {"datagrams": "datagrams", "stream": "TLS over TCP"}[transport]
            panel.plot(times, [100 * s for s in shares], color=colour, label=label)
        panel.axhline(100 * (1 - loss), color="#888", linewidth=0.8, linestyle=":")
        panel.set(title=f"{loss:.0%} loss", xlabel="seconds", xlim=(0, setting["deadline"]), ylim=(0, 103))
        panel.spines[["top", "right"]].set_visible(False)
    first = np.atleast_1d(panels)[0]
    first.set_ylabel("% of all updates at the server")
    first.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(args.figure, metadata={"Date": None})


def command_draw_packets(args: argparse.Namespace) -> None:
    """Accuracy against megabytes sent, from the results of `safari reproduce packets`."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "safari"
    from matplotlib import pyplot as plt

    cases = json.loads(args.file.read_text())["experiments"]["packets"]["cases"]
    looks = {"whole": ("#c2410c", "x"), "fec": ("#7048a8", "s"), "blocks": ("#0b7285", "o")}
    labels = {"whole": "whole models", "fec": "erasure code", "blocks": "the blocks that came"}
    figure, panel = plt.subplots(figsize=(5.6, 3.2), layout="constrained")
    means = {}
    for name, case in cases.items():
        seeds = case["arms"]["safari+"]["seeds"].values()
        means[name] = [
            float(np.mean([100 * s["top1"] for s in seeds])),
            float(np.mean([s["megabytes_up"] for s in seeds])),
        ]
    for way, (colour, mark) in looks.items():
        chosen = {name.split("-")[0]: pair for name, pair in means.items() if name.endswith(way)}
        tops, sizes = zip(*chosen.values(), strict=True)
        panel.plot(sizes, tops, mark, color=colour, label=labels[way], markersize=6, markerfacecolor="none")
        for loss, (top, size) in chosen.items():
            offset = {"whole": (-4, 7), "fec": (-6, -15), "blocks": (0, 0)}[way]
            if way != "blocks":
                panel.annotate(
                    f"{loss}%",
                    (size, top),
                    xytext=offset,
                    textcoords="offset points",
                    fontsize=8,
                    color=colour,
                )
        if way == "blocks":
            # They lie on each other.
            panel.annotate(
                "1% to 30%",
                (min(sizes), min(tops)),
                xytext=(-56, -4),
                textcoords="offset points",
                fontsize=8,
                color=colour,
            )
    panel.set(xlabel="megabytes sent by all clients", ylabel="final top-1 accuracy (%)", ylim=(0, 100))
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8, loc="center right")
    figure.savefig(args.figure, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("measure")
    run.add_argument("--clients", type=int, default=300)
    run.add_argument("--down", type=int, default=250_000)
    run.add_argument("--up", type=int, default=100_000)
    run.add_argument("--delay", type=float, default=0.02)
    run.add_argument("--deadline", type=float, default=60.0)
    run.add_argument(
        "--server-rate", type=float, default=2e7, help="bytes a second to all clients; 0: learned"
    )
    run.add_argument(
        "--client-rate", type=float, default=7e4, help="bytes a second of each client; 0: learned"
    )
    run.add_argument("--losses", type=float, nargs="+", default=LOSSES)
    run.add_argument("--out", type=Path, required=True)
    run.set_defaults(go=command_measure)
    draw = commands.add_parser("draw")
    draw.add_argument("file", type=Path)
    draw.add_argument("figure", type=Path)
    draw.set_defaults(go=command_draw)
    packets = commands.add_parser("draw-packets")
    packets.add_argument("file", type=Path)
    packets.add_argument("figure", type=Path)
    packets.set_defaults(go=command_draw_packets)
    end = commands.add_parser("end")
    end.add_argument("role", choices=("server", "clients"))
    end.add_argument("transport", choices=TRANSPORTS)
    end.add_argument("setting", type=json.loads)
    end.set_defaults(go=command_end)
    args = parser.parse_args()
    # So that namespaces and processes are taken down again.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.go(args)


def command_end(args: argparse.Namespace) -> None:
    if (args.role, args.transport) == ("server", "datagrams"):
        serve_datagrams(args.setting)
    else:
        ends = {
            ("clients", "datagrams"): join_datagrams,
            ("server", "stream"): serve_stream,
            ("clients", "stream"): join_stream,
        }
        asyncio.run(ends[args.role, args.transport](args.setting))


if __name__ == "__main__":
    main()
