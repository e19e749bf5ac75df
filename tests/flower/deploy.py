"""A real federation on this machine: SuperLink and SuperNodes as processes, TLS, registered node keys."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from processes import free_ports, wait_until
from safari.net.certificates import make_certificates
from safari.processes import family
from safari.runs import read_lines

BIN = Path(sys.executable).parent
EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-safari"
SOURCE = Path(__file__).parents[2] / "src"


def seconds_to_import(clients: int) -> float:
    """How long the processes of this many clients take to start on this machine, at its present load."""
    begin = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "import safari.flower"]
    processes = [subprocess.Popen(command, env=environment) for _ in range(clients)]
    try:
        assert [process.wait(300) for process in processes] == [0] * clients
    finally:
        for process in processes:
            process.kill()
    return time.monotonic() - begin


def run_config(**values: Any) -> str:
    """Values of a run config as `flwr run` takes them."""
    return " ".join(f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in values.items())


def command_of(pid: int) -> bytes:
    """The command line of a process; empty where it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def bad_day(
    federation: Federation, run: Path, rounds: int, outage: float, deadline: float
) -> list[dict[str, Any]]:
    """All nodes away twice, the server killed twice, a device with another key; returns the records.

    Nobody does anything but start nodes again that have ended, as systemd does on a device. Each event comes once
    something was recorded after the one before; a run that is over by then fails.
    """
    everybody, patience = range(federation.count), 20 * deadline + 240

    def lines() -> list[dict[str, Any]]:
        return list(read_lines(run / "trials/safari/seed-0/rounds.jsonl"))

    def trains(what: str, when: Callable[[dict[str, Any]], bool] = lambda line: True) -> None:
        """Wait for a record that was not there before."""
        before = len(lines())

        def look() -> bool:
            federation.look_after_nodes()
            return any(when(line) for line in lines()[before:])

        wait_until(what, look, patience)
        assert len(lines()) < rounds, f"the run was over before: {what}"

    def leave() -> None:
        for i in everybody:
            federation.kill(f"node-{i}")
        time.sleep(outage)
        for i in everybody:
            federation.start_node(i)

    federation.start_gate()
    federation.start_keeper(run, clients=federation.count, num_server_rounds=rounds, deadline=deadline,
                            success=1.0, model="mlp")  # fmt: skip
    federation.register()
    for i in everybody:
        federation.start_node(i)
    trains("all arrive", lambda line: line["arrived"] == [*everybody])
    leave()
    trains("a round after the first outage")
    federation.kill_server(whole=True)
    trains("a round after the SuperLink was killed", lambda line: line["resumed"])
    leave()
    trains("a round after the second outage")
    federation.kill_server(whole=False)
    trains("a round after the ServerApp was killed", lambda line: line["resumed"])
    last = federation.count - 1
    before = lines()[-1]["nodes"].get(str(last))
    federation.kill(f"node-{last}")
    federation.renew_key(last)
    federation.start_node(last)
    trains(
        "the device with another key",
        lambda line: last in line["arrived"] and line["nodes"][str(last)] != before,
    )

    def done() -> bool:
        federation.look_after_nodes()
        return federation.processes["keeper"].poll() is not None

    wait_until("the run is complete", done, rounds * (deadline + 30) + patience)
    assert federation.processes["keeper"].poll() == 0
    return lines()


class Federation:
    """The processes, their keys and their folder. Use as a context: at its end nothing is left running."""

    def __init__(self, folder: Path, nodes: int):
        self.folder, self.count = folder, nodes
        # What nodes reach, and the SuperLink itself.
        self.port, self.control_port, *self.node_ports = free_ports(nodes + 2)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        home = folder / "flwr"
        home.mkdir(parents=True)
        paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
        self.environment = os.environ | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", "")]),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "NO_COLOR": "1",
        }
        make_certificates(folder, ["localhost", "127.0.0.1"])
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.control_port}"\n'
            f'root-certificates = "{folder / "ca.crt"}"\n'
        )

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.kill(name)
        if "RAY_TMPDIR" in self.environment:
            shutil.rmtree(self.environment["RAY_TMPDIR"], ignore_errors=True)

    def start_simulation(self) -> None:
        """A SuperLink that simulates its nodes, with Ray."""
        (self.folder / "flwr/config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            "insecure = true\n"
        )
        # Models are small, and the machine is shared.
        self.environment["RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION"] = "0.02"
        self.environment["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray")
        self._start(
            "superlink",
            "flower-superlink",
            *("--insecure", "--simulation", "--port", self.port),
            "--disable-runtime-dependency-installation",
        )
        wait_until("SuperLink listens", lambda: self._listens(self.port), 90)

    def start_superlink(self) -> None:
        """A SuperLink that accepts registered nodes only, with a state that outlives it."""
        self._start("superlink", *self._superlink)
        wait_until("SuperLink listens", lambda: self._listens(self.control_port), 90)

    @property
    def _superlink(self) -> list[object]:
        return [
            "flower-superlink",
            *("--ssl-ca-certfile", self.folder / "ca.crt"),
            *("--ssl-certfile", self.folder / "server.crt"),
            *("--ssl-keyfile", self.folder / "server.key"),
            *("--database", self.folder / "superlink.db"),
            *("--host", "127.0.0.1", "--port", self.control_port),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        ]

    def start_keeper(self, run: Path, **config: Any) -> None:
        """`safari flower keep` with such a SuperLink and the example."""
        self._start(
            "keeper",
            *("safari", "flower", "keep", EXAMPLE, "here", "--run", run),
            *("--run-config", run_config(run=str(run), **config), "--"),
            *self._superlink,
        )
        wait_until("SuperLink listens", lambda: self._listens(self.control_port), 120)

    def kill_server(self, whole: bool) -> None:
        """kill -9 below the keeper: the SuperLink with all of its processes, or the ServerApp alone."""
        pids = [
            pid
            for pid in family(self.processes["keeper"].pid)[1:]
            if whole or b"serverapp" in command_of(pid)
        ]
        assert pids
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start_gate(self) -> None:
        """What nodes reach of the SuperLink; it may be there before, and outlive it. Nodes wait for it."""
        self._start(
            "gate",
            sys.executable,
            *("-m", "safari", "net", "gate"),
            *("--superlink", f"127.0.0.1:{self.control_port}", "--host", "127.0.0.1", "--port", self.port),
            *("--authority", self.folder / "ca.crt", "--certificate", self.folder / "server.crt"),
            *("--key", self.folder / "server.key", "--devices", self.count),
        )

    def register(self) -> None:
        """Make every node a key and tell the SuperLink."""
        with ThreadPoolExecutor(self.count) as pool:
            list(pool.map(self._register, range(self.count)))

    def renew_key(self, i: int) -> None:
        """Another key for a node, as of a device that took the place of another."""
        self._register(i)

    def _register(self, i: int) -> None:
        private = ec.generate_private_key(ec.SECP384R1())
        self._write_key(self.folder / f"node-{i}.key", private)
        public = private.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        (self.folder / f"node-{i}.pub").write_bytes(public)
        self.flwr("supernode", "register", self.folder / f"node-{i}.pub", "here")

    def start_node(self, i: int) -> None:
        """A SuperNode with its key; it goes on trying until the SuperLink is there."""
        self._start(
            f"node-{i}",
            "flower-supernode",
            *("--root-certificates", self.folder / "ca.crt", "--superlink", f"127.0.0.1:{self.port}"),
            *("--auth-supernode-private-key", self.folder / f"node-{i}.key"),
            *("--port", self.node_ports[i]),
            *("--node-config", f"partition-id={i} num-partitions={self.count}"),
        )

    def sign_off(self, i: int, node_id: int) -> None:
        """Say with a node's key that it has gone, as a SuperNode does at its end and a killed one does not.

        Otherwise the SuperLink counts it as connected until it has missed two heartbeats, for a minute.
        """
        private = serialization.load_ssh_private_key((self.folder / f"node-{i}.key").read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        signed = [NodeAuthHttpInterceptor(private, private.public_key())]
        server, authority = f"127.0.0.1:{self.port}", str(self.folder / "ca.crt")
        with (
            FleetHttpClient.from_server_address(server, False, authority, signed) as client,
            # After that minute the SuperLink has found out by itself, and says so.
            contextlib.suppress(httpx.HTTPStatusError),
        ):
            client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))

    def look_after_nodes(self) -> None:
        """Start SuperNodes again that have ended by themselves, as systemd would.

        One that was killed counts as connected until it has missed two heartbeats; until then the SuperLink
        turns away another with its key.
        """
        for name, process in list(self.processes.items()):
            if name.startswith("node-") and process.poll() is not None:
                self.start_node(int(name.removeprefix("node-")))

    def flwr(self, *arguments: object) -> str:
        """Run `flwr ARGUMENTS` to its end."""
        found = subprocess.run(
            [BIN / "flwr", *map(str, arguments)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    def submit(self, **config: Any) -> int:
        """`flwr run` the example with these values of its run config; returns the run's id."""
        size = f"num-supernodes={self.count} client-resources-num-cpus=1 init-args-num-cpus=2"
        simulated = ("--federation-config", size) if "RAY_TMPDIR" in self.environment else ()
        told = self.flwr(
            "run", EXAMPLE, "here", "--run-config", run_config(**config), "--format", "json", *simulated
        )
        return int(json.loads(told)["run-id"])

    def stop(self, run: int) -> None:
        """`flwr stop` a run.

        One whose ServerApp was killed counts as running for another minute, and nodes work off what it has asked for.
        """
        self.flwr("stop", run, "here")

    def kill(self, name: str) -> None:
        """kill -9 a process and all that it started."""
        self._signal(name, signal.SIGKILL)
        self.processes.pop(name).wait(30)

    def pause(self, name: str) -> None:
        """Freeze a process and all that it started."""
        self._signal(name, signal.SIGSTOP)

    def wake(self, name: str) -> None:
        """Let it go on."""
        self._signal(name, signal.SIGCONT)

    def _signal(self, name: str, what: signal.Signals) -> None:
        """Parents first, so that none can start another meanwhile."""
        for pid in family(self.processes[name].pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)

    def log(self, name: str) -> str:
        """What a process has said."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Show the ends of all logs when something inside fails."""
        try:
            yield
        except BaseException:
            for path in sorted(self.folder.glob("*.log")):
                print(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}")
            raise

    def _start(self, name: str, program: str, *arguments: object) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [BIN / program, *map(str, arguments)],
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                # Apart from pytest's own group, so that an interrupt there is handled here.
                start_new_session=True,
            )

    def _listens(self, port: int) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    @staticmethod
    def _write_key(path: Path, private: ec.EllipticCurvePrivateKey) -> None:
        path.write_bytes(
            private.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.OpenSSH,
                serialization.NoEncryption(),
            )
        )
        path.chmod(0o600)
