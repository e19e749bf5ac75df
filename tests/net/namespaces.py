"""A network of one's own on this machine: namespaces on a bridge, loss by nft, and nothing left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from safari.processes import family

SERVER, RELAY = "10.77.0.1", "10.77.0.2"
SOURCE = Path(__file__).parents[2] / "src"
T = TypeVar("T")
_CLONE_NEWNET = 0x40000000


def address(client: int) -> str:
    return f"10.77.0.{10 + client}"


def why_not() -> str | None:
    """Why no namespaces can be made here; None where they can."""
    if sys.platform != "linux":
        return "network namespaces are of Linux"
    for program in ("ip", "nft"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if os.geteuid():
        return "network namespaces need root"
    name = f"sf{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not allowed: {made.stderr.strip()}"
    try:
        tried = subprocess.run(
            ["ip", "netns", "exec", name, "nft", "add", "table", "inet", "lab"],
            capture_output=True,
            text=True,
        )
        return f"nft does not work here: {tried.stderr.strip()}" if tried.returncode else None
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


def _run(*command: object) -> str:
    found = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, f"{command}: {found.stdout}{found.stderr}"
    return found.stdout


class Network:
    """Namespaces `server`, `relay` and `client-0`, ... on one bridge. Use it in a `with` statement."""

    def __init__(self, clients: int, folder: Path):
        self.clients, self.folder = clients, folder
        self._prefix = f"sf{os.getpid()}"
        self._places = ["server", "relay", *(f"client-{i}" for i in range(clients))]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._processes):
            self.stop(name)
        for place in (*self._places, "bridge"):
            subprocess.run(["ip", "netns", "del", self.name(place)], capture_output=True, check=False)

    def name(self, place: str) -> str:
        return f"{self._prefix}{place}"

    def _build(self) -> None:
        bridge = self.name("bridge")
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "name", "hub0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "dev", "hub0", "up")
        addresses = [SERVER, RELAY, *(address(i) for i in range(self.clients))]
        for number, (place, own) in enumerate(zip(self._places, addresses, strict=True)):
            here = self.name(place)
            _run("ip", "netns", "add", here)
            _run("ip", "-n", here, "link", "set", "dev", "lo", "up")
            _run(
                "ip",
                "link",
                "add",
                "name",
                "eth0",
                "netns",
                here,
                "type",
                "veth",
                "peer",
                "name",
                f"port{number}",
                "netns",
                bridge,
            )
            _run("ip", "-n", bridge, "link", "set", "dev", f"port{number}", "master", "hub0", "up")
            _run("ip", "-n", here, "addr", "add", f"{own}/24", "dev", "eth0")
            _run("ip", "-n", here, "link", "set", "dev", "eth0", "up")
            _run("ip", "netns", "exec", here, "nft", "add", "table", "inet", "lab")
            chain = "{ type filter hook input priority 0; policy accept; }"
            _run("ip", "netns", "exec", here, "nft", f"add chain inet lab input {chain}")

    # --- loss

    def rule(self, place: str, what: str) -> None:
        """Add a rule to what arrives at a place."""
        _run("ip", "netns", "exec", self.name(place), "nft", f"add rule inet lab input {what}")

    def redirect(self, place: str, what: str) -> None:
        """Send what leaves a place elsewhere, by network address translation; `clear` does not undo it."""
        run = ("ip", "netns", "exec", self.name(place), "nft")
        _run(*run, "add table ip detour")
        _run(*run, "add chain ip detour output { type nat hook output priority -100; }")
        _run(*run, f"add rule ip detour output {what}")

    def clear(self) -> None:
        """No loss anywhere."""
        for place in self._places:
            _run("ip", "netns", "exec", self.name(place), "nft", "flush", "chain", "inet", "lab", "input")

    def everywhere(self, what: str) -> None:
        """A rule where datagrams arrive: at the server and at the clients."""
        for place in ("server", *(f"client-{i}" for i in range(self.clients))):
            self.rule(place, what)

    def lose(self, percent: int, of: str = "meta l4proto udp") -> None:
        self.everywhere(f"{of} numgen random mod 100 < {percent} drop")

    def lose_in_bursts(self, percent: int, length: int) -> None:
        self.everywhere(f"meta l4proto udp numgen inc mod {100 * length // percent} < {length} drop")

    def black_out(self) -> None:
        """Nothing goes through, control or data; what is inside a machine does."""
        self.everywhere('iifname != "lo" drop')

    # --- processes

    def start(self, name: str, place: str, *command: object) -> subprocess.Popen[bytes]:
        """A process in a namespace, its words in `name`.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            found = subprocess.Popen(
                ["ip", "netns", "exec", self.name(place), *map(str, command)],
                env=self._environment(name),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes[name] = found
        return found

    def _environment(self, name: str) -> dict[str, str]:
        paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
        home = self.folder / f"home-{name}"
        home.mkdir(exist_ok=True)
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", "HOME": str(home),
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip

    def stop(self, name: str) -> None:
        """End a process and all that it started: asked first, then not."""
        process = self._processes.pop(name)
        for what, seconds in ((signal.SIGTERM, 30), (signal.SIGKILL, 10)):
            if process.poll() is None:
                for pid in family(process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, what)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Show the ends of all logs when something inside fails."""
        try:
            yield
        except BaseException:
            for path in sorted(self.folder.rglob("*.log")):
                print(f"--- {path.name}\n{path.read_text(errors='replace')[-2500:]}")
            raise

    def inside(self, place: str, work: Callable[[], T]) -> T:
        """Call something in a thread that lives in a namespace: the sockets that it makes do, too."""
        found: list[Any] = []

        def run() -> None:
            try:
                with Path(f"/var/run/netns/{self.name(place)}").open() as file:
                    libc = ctypes.CDLL(None, use_errno=True)
                    if libc.setns(file.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                found.append(work())
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(120)
        assert found, f"{place} did not come to an end"
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]
