"""The lab example's processes: a SuperLink with its run on one machine, a SuperNode on each of the others.

The SuperLink listens on loopback; clients reach the gate in front of it (`safari.lab.gate`). It accepts SuperNodes
whose keys have come with an invitation (`safari.lab.invitations`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from flwr.cli.build import build_fab_from_disk

from safari.errors import RunError, SafariError
from safari.lab.gate import ask_to_join
from safari.lab.invitations import Invitations, app_digest, open_invitations, own_key, write_private
from safari.net.certificates import Certificates, fetch_authority, fingerprint, make_certificates
from safari.net.udp import bound
from safari.processes import end_family, supervised
from safari.runs import RoundRecord, RunFolder
from safari.runs.folder import FAILURE
from safari.text import visible
from safari.toml import table_to_toml
from safari.trust import state_folder
from safari.view.server import listen

TOKEN_VARIABLE = "SAFARI_NET_TOKEN"
# Seconds for a SuperLink to listen, and for `flwr` to answer.
_START, _ANSWER = 120.0, 120.0
# Seconds in which the processes of an earlier server must have ended.
_LEFT = 30.0
# A SuperLink turns a client away until the heartbeat of its earlier process is overdue, which takes up to a minute. So
# long, in seconds, a client tries again, with this pause; a SuperNode that ran for longer was not turned away.
_TURNED_AWAY, _PAUSE = 90.0, 10.0
# Between two looks at the records, and at the run's state.
_LOOK, _LOOK_AT_STATE = 0.5, 20.0
_APP = {
    "safari_lab.py": "from safari.lab import app\n\nserver = app.server\nclient = app.client\n",
    "pyproject.toml": """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "safari-lab"
version = "1.0.0"
description = "SAFARI in datagrams on the embedded digits"
license = "Apache-2.0"
dependencies = ["safari-fl[flower,net]"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "safari"

[tool.flwr.app.components]
serverapp = "safari_lab:server"
clientapp = "safari_lab:client"

[tool.flwr.app.config]
{config}
""",
}

Record = Mapping[str, Any]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass(frozen=True)
class Lab:
    """Addresses, folder and settings of the lab's server.

    Args:
        folder: For certificates, logs and, in `run`, the run's records.
        host: The name or address under which clients reach this machine.
        port: The TCP port at which clients reach the gate of the SuperLink.
        data_port: The UDP port of the models.
        settings: The run config: see `app.config_of`.
        control_port: The TCP port of the SuperLink itself, on loopback.
    """

    folder: Path
    host: str
    port: int
    data_port: int
    settings: Mapping[str, Any]
    control_port: int = field(default_factory=_free_port)

    @property
    def run(self) -> Path:
        """The run's folder."""
        return (self.folder / "run").absolute()

    @property
    def app(self) -> Path:
        """The folder of the app that is submitted."""
        return (self.folder / "app").absolute()

    @property
    def failure(self) -> Path:
        """File to which the app's strategy writes why it has ended early."""
        return self.run / FAILURE

    @property
    def certificates(self) -> Certificates:
        """Certificates in the lab's folder."""
        here = (self.folder / "certificates").absolute()
        return Certificates(here / "ca.crt", here / "server.crt", here / "server.key")

    @property
    def fingerprint(self) -> str:
        """Fingerprint by which clients recognise this server."""
        return fingerprint(self.certificates.authority.read_bytes())

    @property
    def control(self) -> str:
        """Address to which apps are submitted, from this machine."""
        return f"127.0.0.1:{self.control_port}"

    @cached_property
    def invitations(self) -> Invitations:
        """Who may join."""
        return open_invitations((self.folder / "invitations").absolute(), int(self.settings["clients"]))

    def invitation(self, client: int) -> str:
        """The command for a client. It contains a secret: hand it to that client alone."""
        return (
            f"safari net join {self.host}:{self.port} --client {client} --clients {self.settings['clients']} "
            f"--fingerprint {self.fingerprint} --token {self.invitations.token(client)}"
        )

    def prepare(self) -> None:
        """Write what the processes need; certificates and invitations that are there stay."""
        try:
            str(self.folder.absolute()).encode()
        except UnicodeEncodeError as error:
            raise SafariError(f"the folder must have a name in UTF-8, got {str(self.folder)!r}") from error
        try:
            self._refuse_others()
            self._write()
        except OSError as error:
            raise SafariError(f"cannot write into {self.folder}: {error.strerror or error}") from error

    def _refuse_others(self) -> None:
        """SafariError for a folder of something else: a simulation's run, say, or a home."""
        if (self.folder / "invitations").exists() or not self.folder.exists():
            return
        ours = {path.name for path in (self.app, self.run)} | {"flwr", "certificates"}
        others = sorted({path.name for path in self.folder.iterdir()} - ours)
        if others:
            raise SafariError(
                f"{self.folder} must be new, empty, or of this command, and holds {visible(others[0], 100)!r}"
            )

    def _write(self) -> None:
        found, home = self.certificates, self.folder / "flwr"
        # Before a secret is put there.
        for place in (self.folder, home, self.app, found.key.parent):
            place.mkdir(parents=True, exist_ok=True)
            _refuse_foreign(place)
        if not all(path.exists() for path in (found.authority, found.server, found.key)):
            make_certificates(found.key.parent, [self.host, "localhost", "127.0.0.1"])
        self.failure.unlink(missing_ok=True)
        lines = [self.invitation(client) for client in range(self.invitations.clients)]
        write_private(self.invitations.folder / "commands.txt", "\n".join([*lines, ""]).encode())
        connection = {"address": self.control, "root-certificates": str(found.authority)}
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "lab"\n\n[superlink.lab]\n{table_to_toml(connection)}\n',
            encoding="utf-8",
        )
        table = {
            "host": self.host,
            "port": self.data_port,
            "listen": "0.0.0.0",
            "public-port": 0,
            "superlink": f"{self.host}:{self.port}",
            "root-certificates": str(found.authority),
            "run": str(self.run),
            **self.settings,
        }
        for name, text in _APP.items():
            (self.app / name).write_text(text.replace("{config}", table_to_toml(table)), encoding="utf-8")


def _refuse_foreign(folder: Path) -> None:
    """SafariError where other users could have put code for the clients, or a key of theirs, into a folder."""
    about = folder.stat()
    if not hasattr(os, "geteuid"):
        return
    if about.st_uid != os.geteuid() or about.st_mode & stat.S_IWOTH:
        raise SafariError(
            f"{folder} must belong to the user who serves, and others must not be able to write there, as code from "
            f"it runs on every client; got user id {about.st_uid}, mode {stat.S_IMODE(about.st_mode):o}"
        )


@contextlib.contextmanager
def superlink(lab: Lab) -> Iterator[Callable[[], None]]:
    """The SuperLink, and the gate in front of it, during the run; their output is in superlink.log and gate.log.

    Gives a function that raises SafariError when one of them has ended.
    """
    found = lab.certificates
    arguments = [
        *("--ssl-ca-certfile", found.authority),
        *("--ssl-certfile", found.server),
        *("--ssl-keyfile", found.key),
        *("--host", "127.0.0.1", "--port", lab.control_port),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    ]
    # The same bytes as `flwr run` makes of the folder; clients are given no others.
    app = app_digest(build_fab_from_disk(lab.app))
    # -P: no modules are imported from the folder in which it runs.
    gate = [
        *(sys.executable, "-P", "-m", "safari", "net", "gate"),
        *("--superlink", lab.control, "--authority", found.authority, "--certificate", found.server),
        *("--key", found.key, "--port", lab.port, "--devices", lab.invitations.clients),
        *("--invitations", lab.invitations.folder, "--app", app),
    ]
    with contextlib.ExitStack() as stack:
        running = {}
        for name, port, command in (
            ("SuperLink", lab.control_port, [_program("flower-superlink"), *arguments]),
            ("gate", lab.port, gate),
        ):
            file = lab.folder / f"{name.lower()}.log"
            process = _start(command, lab.folder, stack.enter_context(file.open("ab")))
            stack.callback(end_family, process)
            running[name] = process, file
            _wait_until_it_listens(name, process, port, file)

        def check() -> None:
            for name, (process, file) in running.items():
                if process.poll() is not None:
                    raise SafariError(
                        f"the {name} has ended; its last words, from {file}: {_last_words(file)}"
                    )

        yield check


def follow(lab: Lab, check: Callable[[], None], tell: Callable[[Record], None]) -> None:
    """Submit the run, report each round, and return when all are done.

    SafariError where the run fails, or `check` finds that a process has ended.
    """
    number = _flwr(lab, "run", lab.app, "lab", "--format", "json").get("run-id")
    rounds, told, looked = int(lab.settings["rounds"]), rounds_done(lab), time.monotonic()
    while told < rounds:
        time.sleep(_LOOK)
        records = _records(lab)
        for record in records[told:]:
            tell(record)
        told = len(records)
        check()
        _refuse_failed(lab)
        if told < rounds and time.monotonic() - looked > _LOOK_AT_STATE:
            looked = time.monotonic()
            _refuse_ended(lab, number)


def wait_until_free(lab: Lab) -> None:
    """Wait until no process of an earlier server writes the run; RunError if one still does after `_LEFT` seconds."""
    end = time.monotonic() + _LEFT
    while (lab.run / "config.toml").exists():
        try:
            with RunFolder.open(lab.run).writing():
                return
        except RunError:
            if time.monotonic() > end:
                raise
        time.sleep(_LOOK)


def check_ports(lab: Lab) -> None:
    """SafariError where a port is taken, or not allowed. Where there was a server before, it gets time to end."""
    end = time.monotonic() + (_LEFT if lab.app.exists() else 0.0)
    while True:
        try:
            listen("0.0.0.0", lab.port).close()
            bound("0.0.0.0", lab.data_port).close()
        except SafariError:
            if time.monotonic() > end:
                raise
        else:
            return
        time.sleep(_LOOK)


def join(
    address: str,
    client: int,
    clients: int,
    *,
    token: str,
    known_by: str | None,
    certificate: Path | None,
    tell: Callable[[str], None],
) -> int:
    """A SuperNode in the foreground, until it is stopped; returns its exit code.

    One that was killed before is turned away while the SuperLink still waits for its heartbeat: it tries again.

    Args:
        address: host:port of the server's gate.
        client: Which client this is, of `clients`.
        token: The client's, from the server's invitation.
        known_by: The fingerprint of the server's authority; or its `certificate`.
        tell: Is given a line where it tries again.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise SafariError(f"server must be host:port, got {address!r}")
    if (known_by is None) == (certificate is None):
        raise SafariError("the server must be known by one of --fingerprint and --certificate")
    if certificate is None and known_by is not None:
        authority = fetch_authority(host.strip("[]"), int(port), known_by)
    else:
        authority = Path(str(certificate)).read_bytes()
    # Not in a cache: the key is what the server knows this client by.
    folder = state_folder() / "net" / f"{re.sub(r'[^A-Za-z0-9.]', '_', host)}-{port}-{client}"
    root, key = folder / "ca.crt", folder / "node.key"
    write_private(root, authority)
    end = time.monotonic() + (_TURNED_AWAY if key.exists() else 0.0)
    ask_to_join(address, root, client, token, own_key(key), clients)
    arguments = supernode_arguments(address, root, key, client, clients)
    while True:
        began = time.monotonic()
        process = _start([_program("flower-supernode"), *arguments], folder, None)
        try:
            code = process.wait()
        finally:
            end_family(process)
        now = time.monotonic()
        if not code or now - began > _PAUSE or now > end:
            return code
        tell(
            f"the SuperNode ended with exit code {code}: if this client was killed, the server may hold its place for "
            f"up to a minute. Trying again, for {end - now:.0f} s more"
        )
        time.sleep(_PAUSE)


def supernode_arguments(address: str, root: Path, key: Path, client: int, clients: int) -> list[object]:
    """Arguments of `flower-supernode`. It reconnects for as long as the server is away: with a limit
    (`--max-wait-time`) it would stop trying and still keep running."""
    return [
        *("--root-certificates", root),
        *("--superlink", address, "--host", "127.0.0.1", "--port", _free_port()),
        *("--auth-supernode-private-key", key),
        *("--node-config", f"partition-id={client} num-partitions={clients}"),
    ]


def own_address() -> str:
    """The address by which others on the network most likely reach this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: this only asks which interface would be taken.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _program(name: str) -> str:
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.defpath]))
    if found is None:
        raise SafariError(f"{name} must be installed: pip install 'safari-fl[flower,net]'")
    return found


def _start(command: list[Any], folder: Path, log: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        supervised(command),
        env=_environment(folder),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        # Ctrl-C is for this process, which then ends the other.
        start_new_session=True,
    )


def _environment(folder: Path) -> dict[str, str]:
    home = (folder / "flwr").absolute()
    # The token is for `join` alone, and not for the apps that a SuperNode starts.
    inherited = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    return inherited | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # Otherwise ports of their own, on all interfaces.
        "FLWR_INTERNAL_GRPC_CONTROL_API": "0",
        "FLWR_INTERNAL_GRPC_FLEET_API": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "NO_COLOR": "1",
    }


def _wait_until_it_listens(name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + _START
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    raise SafariError(
        f"the {name} must listen on port {port} within {_START:g} s; its last words, from {log}: {_last_words(log)}"
    )


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return visible(lines[-1]) if lines else "none"


def _flwr(lab: Lab, *arguments: object) -> dict[str, Any]:
    try:
        found = subprocess.run(
            [Path(sys.executable).parent / "flwr", *map(str, arguments)],
            env=_environment(lab.folder),
            cwd=lab.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SafariError(f"flwr {arguments[0]} must answer within {_ANSWER:g} s: {error}") from error
    if found.returncode:
        raise SafariError(f"flwr {arguments[0]} failed: {(found.stdout + found.stderr).strip()[-500:]}")
    try:
        table: dict[str, Any] = json.loads(found.stdout[found.stdout.index("{") :])
    except ValueError:
        return {}
    if table.get("success") is False:
        raise SafariError(f"flwr {arguments[0]} failed: {str(table.get('error-message', '')).strip()[-500:]}")
    return table


def _refuse_failed(lab: Lab) -> None:
    if lab.failure.exists():
        raise SafariError(f"the run ended: {lab.failure.read_text(encoding='utf-8').strip()}")


def _refuse_ended(lab: Lab, number: Any) -> None:
    """Raise SafariError if the run ended early and the app could not say why: it was killed."""
    if number is None:
        return
    try:
        runs = _flwr(lab, "list", "lab", "--run-id", number, "--format", "json").get("runs", [])
    except SafariError:
        # A SuperLink that is too busy to answer says nothing about the run; that it is there is checked elsewhere.
        return
    status = str(runs[0].get("status", "")) if runs else ""
    if status.startswith("finished") and rounds_done(lab) < int(lab.settings["rounds"]):
        raise SafariError(
            f"the run ended as {status} after {rounds_done(lab)} of {lab.settings['rounds']} rounds, and did not say "
            f"why; the SuperLink's log is {lab.folder / 'superlink.log'}"
        )


def _records(lab: Lab) -> list[RoundRecord]:
    if not (lab.run / "config.toml").exists():
        return []
    trials = RunFolder.open(lab.run).trials()
    return trials[0].records() if trials else []


def rounds_done(lab: Lab) -> int:
    """Number of rounds recorded in the run's folder."""
    return len(_records(lab))
