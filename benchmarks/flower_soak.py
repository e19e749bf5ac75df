"""Soak test of a Flower federation: kills, freezes and restarts of every part, and hostile replies.

    python benchmarks/flower_soak.py --rounds 200 --out results/flower/soak.json

Every part is a process of its own: a broker in the SuperLink's place, a server with SafariStrategy and a
run's folder, and clients with `sparse` training functions. They exchange Flower's messages as the bytes that
Flower makes of them. At random times a part is killed (-9) or frozen, and started again, half of the clients
with new node ids; 30% of the replies come from `tests/flower/hostile.py`. Checked:

- every round is recorded once and in order, whatever was killed;
- no round is lost in which an honest reply was delivered;
- no part exits by itself;
- no process grows: by less than 5% from its tenth round to its last, where it lived for 20 rounds or more.

The broker replaces the SuperLink because a SuperNode starts a process for every message: 200 rounds would
take hours. With `--outage SECONDS` there is no broker, and nobody is hostile: `safari flower keep` runs a real
SuperLink with the ready app, and three SuperNodes with keys. All nodes are away twice for that long, the SuperLink
with all of its processes is killed, then the ServerApp alone, and a device comes back with another key:

    python benchmarks/flower_soak.py --outage 75 --rounds 40 --out results/flower/outages.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import secrets
import signal
import socket
import socketserver
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

# In the place of this folder, in which there is another `flower`.
sys.path[0] = str(Path(__file__).resolve().parents[1] / "tests")

from flower.deploy import Federation, bad_day  # noqa: E402
from flower.hostile import attacks, giants  # noqa: E402
from flower.kit import Net, Raw, WithoutSuperLink, net, objects  # noqa: E402
from safari.flower import SafariStrategy, sparse  # noqa: E402
from safari.runs import RunFolder  # noqa: E402

TIMEOUT = 3.0
# Seconds without a word after which a node counts as gone.
HEARTBEAT = 4.0


# --- bytes between the parts


def call(path: Path, header: dict, blob: bytes = b"") -> tuple[dict, bytes]:
    """One question to the broker, and its answer."""
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(20)
        s.connect(str(path))
        send(s, header, blob)
        return receive(s)


def send(s: socket.socket, header: dict, blob: bytes) -> None:
    head = json.dumps(header).encode()
    s.sendall(struct.pack("<II", len(head), len(blob)) + head + blob)


def receive(s: socket.socket) -> tuple[dict, bytes]:
    sizes = struct.unpack("<II", exactly(s, 8))
    return json.loads(exactly(s, sizes[0])), exactly(s, sizes[1])


def exactly(s: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = s.recv(min(count, 1 << 20))
        if not part:
            raise ConnectionError("the other end is gone")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def to_blob(object_id: str, parts: dict[str, bytes]) -> bytes:
    index = json.dumps([object_id, [[name, len(data)] for name, data in parts.items()]]).encode()
    return struct.pack("<I", len(index)) + index + b"".join(parts.values())


def from_blob(blob: bytes) -> tuple[str, dict[str, bytes]]:
    (size,) = struct.unpack("<I", blob[:4])
    object_id, index = json.loads(blob[4 : 4 + size])
    parts, at = {}, 4 + size
    for name, length in index:
        parts[name], at = blob[at : at + length], at + length
    return object_id, parts


# --- the broker


class Broker(socketserver.ThreadingUnixStreamServer):
    """Messages to nodes and replies to messages, each delivered once; its state is lost with the process."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, path: Path):
        super().__init__(str(path), Handler)
        self.lock = threading.Lock()
        self.seen: dict[int, float] = {}
        self.inbox: dict[int, list[tuple[str, bytes]]] = {}
        self.asked: dict[str, int] = {}
        self.replies: dict[str, bytes] = {}

    def answer(self, header: dict, blob: bytes) -> tuple[dict, bytes]:
        with self.lock:
            return getattr(self, f"do_{header.pop('op')}")(blob, **header)

    def do_poll(self, blob: bytes, node: int) -> tuple[dict, bytes]:
        self.seen[node] = time.monotonic()
        waiting = self.inbox.get(node)
        if not waiting:
            return {"id": None}, b""
        name, message = waiting.pop(0)
        return {"id": name}, message

    def do_reply(self, blob: bytes, to: str, node: int) -> tuple[dict, bytes]:
        self.seen[node] = time.monotonic()
        if self.asked.get(to) == node:
            self.replies[to] = blob
        return {}, b""

    def do_nodes(self, blob: bytes) -> tuple[dict, bytes]:
        return {"nodes": [node for node in self.seen if self.online(node)]}, b""

    def do_push(self, blob: bytes, to: str, node: int) -> tuple[dict, bytes]:
        self.asked[to] = node
        self.inbox.setdefault(node, []).append((to, blob))
        return {}, b""

    def do_pull(self, blob: bytes, to: str) -> tuple[dict, bytes]:
        if to in self.replies:
            self.asked.pop(to, None)
            return {"found": True}, self.replies.pop(to)
        return {"found": False, "gone": not self.online(self.asked.get(to, -1))}, b""

    def do_new_run(self, blob: bytes) -> tuple[dict, bytes]:
        """Forget what an earlier server asked for."""
        self.inbox, self.asked, self.replies = {}, {}, {}
        return {}, b""

    def online(self, node: int) -> bool:
        return time.monotonic() - self.seen.get(node, -1e9) < HEARTBEAT


class Handler(socketserver.BaseRequestHandler):
    """One question a connection."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            send(self.request, *self.server.answer(*receive(self.request)))


def run_broker(folder: Path) -> None:
    path = folder / "socket"
    path.unlink(missing_ok=True)
    Broker(path).serve_forever(0.1)


# --- the server


def data(seed: int, count: int):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    return x, x[:, :3].argmax(1)


class BrokerGrid(WithoutSuperLink):
    """A Grid on top of the broker; counts the honest replies that it delivers, by round."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.honest = path, Counter()
        self.sent: dict[str, Message] = {}

    def get_node_ids(self):
        return call(self.path, {"op": "nodes"})[0]["nodes"]

    def push_messages(self, messages):
        # Those of the last round are not waited for any more.
        self.sent = {}
        for message in messages:
            name = secrets.token_hex(8)
            message.metadata.__dict__["_message_id"] = name
            self.sent[name] = message
            blob = to_blob(message.object_id, objects(message))
            call(self.path, {"op": "push", "to": name, "node": message.metadata.dst_node_id}, blob)
        return list(self.sent)

    def pull_messages(self, message_ids):
        return [reply for name in message_ids for reply in self._pull(name)]

    def _pull(self, name: str) -> list[Message]:
        header, blob = call(self.path, {"op": "pull", "to": name})
        if header["found"]:
            reply = inflate_object_from_contents(*from_blob(blob))
            if reply.has_content() and "honest" in reply.content.config_records:
                self.honest[self.sent[name].content["config"]["server-round"]] += 1
            return [reply]
        return [Message(Error(5, "Node Unavailable"), reply_to=self.sent[name])] if header["gone"] else []


def run_server(folder: Path, rounds: int, clients: int, rule: str) -> None:
    torch.set_num_threads(1)
    grid = BrokerGrid(folder / "socket")
    wait_for(grid)
    x, y = data(10**6, 2000)
    model, lines = Net(), (folder / "server.jsonl").open("a")

    def test(number, arrays):
        model.load_state_dict(arrays.to_torch_state_dict())
        model.eval()
        with torch.no_grad():
            accuracy = float((model(x).argmax(1) == y).float().mean())
        line = {"round": number, "honest": grid.honest[number]}
        lines.write(json.dumps(line) + "\n")
        lines.flush()
        return MetricRecord({"accuracy": accuracy})

    strategy = SafariStrategy(
        net(),
        clients,
        rule,
        config={
            "wire": {"values": "step"},
            "pruning": {"sparsity": 0.5},
            "aggregation": {"weights": "samples"},
        },
        run=folder / "run",
        download="step",
        evaluate=True,
        patience=30,
        min_nodes=2,
        wait=60.0,
    )
    strategy.start(grid, num_rounds=rounds, timeout=TIMEOUT, evaluate_fn=test)


def wait_for(grid: BrokerGrid) -> None:
    """Wait for the broker, then discard what an earlier server asked for."""
    for _ in range(600):
        with contextlib.suppress(OSError):
            call(grid.path, {"op": "new_run"})
            return
        time.sleep(0.1)
    raise ConnectionError("there is no broker")


# --- a client


def run_client(folder: Path, number: int, node: int, hostile: float, seed: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(f"{seed} {number} {os.getpid()}")
    choices = list((attacks() | giants()).values())
    x, y = data(number, 200)
    app = ClientApp()

    @app.train()
    @sparse(Net)
    def train(model, message, context):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model.train()
        for _ in range(5):
            pick = torch.randint(len(x), (32,))
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x[pick]), y[pick])
            loss.backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(x), "train_loss": float(loss.detach())})
        return RecordDict({"metrics": metrics, "honest": ConfigRecord({"yes": True})})

    @app.evaluate()
    @sparse(Net)
    def evaluate(model, message, context):
        model.eval()
        with torch.no_grad():
            accuracy = float((model(x).argmax(1) == y).float().mean())
        return {"num-examples": len(x), "accuracy": accuracy}

    context = Context(1, node, {"safari-id": f"client {number}"}, RecordDict(), {})
    path = folder / "socket"
    while True:
        try:
            header, blob = call(path, {"op": "poll", "node": node})
            if header["id"] is None:
                time.sleep(0.03)
                continue
            message = inflate_object_from_contents(*from_blob(blob))
            message.metadata.__dict__["_message_id"] = header["id"]
            try:
                reply = app(message, context)
            except Exception as error:
                reply = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
            if rng.random() < hostile:
                with contextlib.suppress(Exception):
                    reply = rng.choice(choices)(message, without_honesty(reply))
            raw = reply if isinstance(reply, Raw) else Raw(reply.object_id, objects(reply))
            call(path, {"op": "reply", "to": header["id"], "node": node}, to_blob(raw.object_id, raw.objects))
        except (OSError, ConnectionError):
            time.sleep(0.2)


def without_honesty(reply):
    """The honest reply that an attack begins with, without the mark by which the soak knows honest ones."""
    if reply.has_content():
        reply.content.pop("honest", None)
    return reply


# --- faults


class Part:
    """A process that is restarted when it has exited; forked, because importing torch takes longer than
    the rounds in between."""

    def __init__(self, name: str, folder: Path, work):
        self.name, self.folder, self.work = name, folder, work
        self.pid: int | None = None
        self.again = 0.0
        self.expected = False
        # Resident bytes of every process of this part, one number for each round of its life.
        self.memory: dict[int, list[int]] = {}

    def look_after(self, rng: random.Random) -> int | None:
        """Start it, or notice that it exited: returns the exit code unless we killed it."""
        if self.pid is None:
            if time.monotonic() >= self.again:
                self.expected, self.pid = False, self._start()
            return None
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if not done:
            return None
        self.pid, self.again = None, time.monotonic() + rng.uniform(0.1, 2.0)
        return None if self.expected else os.waitstatus_to_exitcode(status)

    def measure(self) -> None:
        """Note the resident memory of the process."""
        with contextlib.suppress(OSError, IndexError):
            if self.pid is not None:
                pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
                self.memory.setdefault(self.pid, []).append(pages * os.sysconf("SC_PAGE_SIZE"))

    def kill(self) -> None:
        self.expected = True
        self.signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.kill()
        if self.pid is not None:
            os.waitpid(self.pid, 0)

    def signal(self, what: signal.Signals) -> None:
        if self.pid is not None:
            os.kill(self.pid, what)

    def _start(self) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            log = os.open(self.folder / f"{self.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            self.work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


# Fault -> its probability in a round. The server must live long enough for its memory to be judged.
FAULTS = {
    "client killed": 0.25,
    "client frozen": 0.25,
    "server frozen": 0.05,
    "server killed": 0.03,
    "broker frozen": 0.05,
    "broker killed": 0.015,
}


class FaultInjector:
    """Draws faults after each round and injects them during the next one."""

    def __init__(self, rng: random.Random, broker: Part, server: Part, nodes: list[Part]):
        self.rng, self.broker, self.server, self.nodes = rng, broker, server, nodes
        self.faults: Counter[str] = Counter()
        self.due: list[tuple[float, str]] = []
        self.frozen: list[tuple[float, Part]] = []

    def round_done(self) -> None:
        """Draw the faults of the next round."""
        for kind, chance in FAULTS.items():
            if self.rng.random() < chance:
                self.due.append((time.monotonic() + self.rng.uniform(0.0, 1.0), kind))

    def step(self) -> None:
        """Inject the faults that are due."""
        now = time.monotonic()
        for item in [item for item in self.due if item[0] <= now]:
            self.due.remove(item)
            self._inject(item[1], now)
        for item in [item for item in self.frozen if item[0] <= now]:
            self.frozen.remove(item)
            item[1].signal(signal.SIGCONT)

    def _inject(self, kind: str, now: float) -> None:
        self.faults[kind] += 1
        part = {"client": self.rng.choice(self.nodes), "server": self.server, "broker": self.broker}[kind[:6]]
        if kind.endswith("frozen"):
            part.signal(signal.SIGSTOP)
            self.frozen.append((now + self.rng.uniform(0.5, 6.0), part))
            return
        part.kill()
        if part is self.broker:
            # Its messages are lost, so the server could not reach any client.
            self.server.kill()


def soak(folder: Path, rounds: int, clients: int, rule: str, hostile: float, seed: int, limit: float) -> dict:
    """Run the federation; returns the report. No process is left running."""
    rng = random.Random(seed)

    def client(i: int):
        # Every second client has a registered key, and so a permanent node id.
        return lambda: run_client(folder, i, 1000 + i if i % 2 else rng.getrandbits(40), hostile, seed)

    broker = Part("broker", folder, lambda: run_broker(folder))
    server = Part("server", folder, lambda: run_server(folder, rounds, clients, rule))
    nodes = [Part(f"client-{i}", folder, client(i)) for i in range(clients)]
    parts, injector = [broker, server, *nodes], FaultInjector(rng, broker, server, nodes)
    records = folder / "server.jsonl"
    ended: list[str] = []
    begin, seen = time.monotonic(), 0
    try:
        while time.monotonic() - begin < limit:
            for part in parts:
                code = part.look_after(rng)
                if code == 0 and part is server:
                    return report(folder, rounds, injector.faults, parts, ended, time.monotonic() - begin)
                if code is not None:
                    ended.append(f"{part.name} ended by itself with {code}")
            # A new id for a client that is restarted.
            rng.getrandbits(40)
            size = records.stat().st_size if records.exists() else 0
            if size > seen:
                seen = size
                for part in parts:
                    part.measure()
                injector.round_done()
            injector.step()
            time.sleep(0.03)
        ended.append(f"not done after {limit:g} s")
        return report(folder, rounds, injector.faults, parts, ended, limit)
    finally:
        for part in parts:
            part.end()


def report(
    folder: Path, rounds: int, faults: Counter, parts: list[Part], ended: list[str], seconds: float
) -> dict:
    """Summarise the records, and list every check that failed."""
    records = RunFolder.open(folder / "run").trials()[0].records()
    lines = [json.loads(line) for line in (folder / "server.jsonl").read_text().splitlines()]
    # A round that was in flight when the server was killed is done again: the last line of it counts.
    honest = {line["round"]: line["honest"] for line in lines}
    lost = [r["round"] for r in records if r["lost"]]
    memory = [life for part in parts for life in lives(part)]
    problems = list(ended)
    if [r["round"] for r in records] != list(range(1, rounds + 1)):
        problems.append(f"rounds are not 1 to {rounds}: {[r['round'] for r in records]}")
    problems += [
        f"round {t} is lost, and {honest[t]} honest replies were delivered" for t in lost if honest.get(t)
    ]
    problems += [
        f"{life['part']} grew by {life['growth']:.1%} in {life['rounds']} rounds"
        for life in memory
        if life["growth"] > 0.05
    ]
    reasons = Counter(kind_of(reason) for r in records for reason in r["reasons"].values())
    return {
        "rounds": len(records),
        "seconds": round(seconds),
        "faults": dict(faults),
        "arrived": sum(len(r["arrived"]) for r in records),
        "missing": sum(len(r["missing"]) for r in records),
        "refused": sum(len(r["refused"]) for r in records),
        "ignored": sum(len(r["ignored"]) for r in records),
        "reasons": dict(reasons.most_common(12)),
        "honest delivered": sum(honest.get(r["round"], 0) for r in records),
        "lost rounds": lost,
        "resumed": sum(bool(r["resumed"]) for r in records),
        "accuracy": {"first": records[0]["top1"], "last ten": [round(r["top1"], 3) for r in records[-10:]]},
        "memory": memory,
        "problems": problems,
    }


def lives(part: Part, least: int = 20) -> list[dict]:
    """Memory of each process of a part that lived for `least` rounds or more."""
    return [
        {
            "part": part.name,
            "rounds": len(own),
            "tenth_mb": round(own[9] / 1e6, 1),
            "last_mb": round(own[-1] / 1e6, 1),
            "growth": round(own[-1] / own[9] - 1, 4),
        }
        for own in part.memory.values()
        if len(own) >= least
    ]


def kind_of(reason: str) -> str:
    """A reason without its numbers, so that it can be counted."""
    return "".join(c for c in reason if not c.isdigit())[:60]


def outages(folder: Path, rounds: int, outage: float, deadline: float) -> dict:
    """A bad day of real processes: every round that is recorded has arrivals, and nobody types anything."""
    begin = time.monotonic()
    with Federation(folder, 3) as federation, federation.explained():
        records = bad_day(federation, folder / "run", rounds, outage, deadline)
        keeper = federation.log("keeper").splitlines()
    problems = [f"round {r['round']} has no arrivals" for r in records if not r["arrived"]]
    if [r["round"] for r in records] != list(range(1, rounds + 1)):
        problems.append(f"rounds are not 1 to {rounds}: {[r['round'] for r in records]}")
    return {
        "rounds": len(records),
        "seconds": round(time.monotonic() - begin),
        "arrived": sum(len(r["arrived"]) for r in records),
        "missing": sum(len(r["missing"]) for r in records),
        "resumed": [r["round"] for r in records if r["resumed"]],
        "keeper": [line for line in keeper if "starting again" in line or "is submitted" in line],
        "nodes": sorted({(client, node) for r in records for client, node in r["nodes"].items()}),
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--rule", default="safari+")
    parser.add_argument("--hostile", type=float, default=0.3, help="the share of replies that are hostile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which the soak is aborted")
    parser.add_argument("--outage", type=float, help="real processes, and all nodes away for so many seconds")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds of a round, with --outage")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    real = ("rounds", "outage", "deadline")
    options = {
        k: v for k, v in vars(arguments).items()
        if (k in real if arguments.outage is not None else k not in ("outage", "deadline", "out"))
    }  # fmt: skip
    about = {name: version(name) for name in ("flwr", "torch", "numpy")}
    about |= {"python": platform.python_version(), "cores": os.cpu_count(), "load before": os.getloadavg()}
    with tempfile.TemporaryDirectory() as place:
        work = soak if arguments.outage is None else outages
        found = {"about": about, "options": options, **work(Path(place), **options)}
        if found["problems"]:
            for log in sorted(Path(place).glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
    about["load after"] = os.getloadavg()
    print(json.dumps(found, indent=1))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()
