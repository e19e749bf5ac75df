"""The lab example's processes: a SuperLink with its run on one machine, a SuperNode on each of the others.

For networks on which every machine is trusted: the SuperLink knows neither accounts nor node keys, so that whoever
reaches its port can submit an app, whose code runs on the server and on the clients.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safari.errors import SafariError
from safari.net.certificates import Certificates, fetch_authority, fingerprint, make_certificates
from safari.runs import RoundRecord, RunFolder

# Seconds for a SuperLink to listen, and for `flwr` to answer.
_START, _ANSWER = 120.0, 120.0
# Between two looks at the records, and at the run's state.
_LOOK, _LOOK_AT_STATE = 0.5, 20.0
# Before a process that was asked to end is ended.
_GRACE = 10.0
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


@dataclass(frozen=True)
class Lab:
    """Where the server's side of the lab is, and what it is to do.

    Args:
        folder: For certificates, logs and, in `run`, the run's records.
        host: The name or address under which clients reach this machine.
        port: The TCP port of the SuperLink.
        data_port: The UDP port of the models.
        settings: The run config: see `app.config_of`.
    """

    folder: Path
    host: str
    port: int
    data_port: int
    settings: Mapping[str, Any]

    @property
    def run(self) -> Path:
        """The run's folder."""
        return (self.folder / "run").absolute()

    @property
    def certificates(self) -> Certificates:
        """Those that are there."""
        here = (self.folder / "certificates").absolute()
        return Certificates(here / "ca.crt", here / "server.crt", here / "server.key")

    @property
    def fingerprint(self) -> str:
        """How clients know that it is this server."""
        return fingerprint(self.certificates.authority.read_bytes())

    def prepare(self) -> None:
        """Write what the processes need; certificates that are there stay."""
        found = self.certificates
        if not all(path.exists() for path in (found.authority, found.server, found.key)):
            make_certificates(found.key.parent, [self.host, "localhost", "127.0.0.1"])
        home, app = self.folder / "flwr", self.folder / "app"
        for place in (home, app):
            place.mkdir(parents=True, exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "lab"\n\n[superlink.lab]\naddress = "{self.host}:{self.port}"\n'
            f'root-certificates = "{found.authority}"\n'
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
        config = "\n".join(f"{name} = {json.dumps(value)}" for name, value in table.items())
        for name, text in _APP.items():
            (app / name).write_text(text.replace("{config}", config))


@contextlib.contextmanager
def superlink(lab: Lab) -> Iterator[None]:
    """The SuperLink while the run goes on; its words are in superlink.log."""
    found = lab.certificates
    arguments = [
        *("--ssl-ca-certfile", found.authority),
        *("--ssl-certfile", found.server),
        *("--ssl-keyfile", found.key),
        *("--host", "0.0.0.0", "--port", lab.port),
        "--disable-runtime-dependency-installation",
    ]
    with (lab.folder / "superlink.log").open("ab") as log:
        process = _start("flower-superlink", arguments, lab.folder, log)
    try:
        _wait_until_it_listens(process, lab)
        yield
    finally:
        _end(process)


def follow(lab: Lab, tell: Callable[[Record], None]) -> None:
    """Submit the run, tell of each round, and return when all are done; SafariError where the run fails."""
    number = _flwr(lab, "run", (lab.folder / "app").absolute(), "lab", "--format", "json").get("run-id")
    rounds, told, looked = int(lab.settings["rounds"]), _done(lab), time.monotonic()
    while told < rounds:
        time.sleep(_LOOK)
        records = _records(lab)
        for record in records[told:]:
            tell(record)
        told = len(records)
        if told < rounds and time.monotonic() - looked > _LOOK_AT_STATE:
            looked = time.monotonic()
            _refuse_failed(lab, number)


def join(address: str, client: int, clients: int, *, known_by: str | None, certificate: Path | None) -> int:
    """A SuperNode in the foreground, until it is stopped; returns its exit code.

    `known_by`: the fingerprint of the server's authority; or its `certificate`.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise SafariError(f"server must be host:port, got {address!r}")
    if (known_by is None) == (certificate is None):
        raise SafariError("the server must be known by one of --fingerprint and --certificate")
    folder = Path.home() / ".cache" / "safari-net" / f"{host}-{port}-{client}"
    folder.mkdir(parents=True, exist_ok=True)
    if certificate is None and known_by is not None:
        certificate = folder / "ca.crt"
        certificate.write_bytes(fetch_authority(host.strip("[]"), int(port), known_by))
    arguments = [
        *("--root-certificates", Path(str(certificate)).absolute()),
        *("--superlink", address, "--host", "127.0.0.1", "--port", _free_port()),
        *("--node-config", f"partition-id={client} num-partitions={clients}"),
        *("--max-wait-time", 600),
    ]
    process = _start("flower-supernode", arguments, folder, None)
    try:
        return process.wait()
    finally:
        _end(process)


def own_address() -> str:
    """The address by which others on the network most likely reach this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: this only asks which interface would be taken.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _start(program: str, arguments: list[Any], folder: Path, log: Any) -> subprocess.Popen[bytes]:
    found = shutil.which(program, path=os.pathsep.join([str(Path(sys.executable).parent), os.defpath]))
    if found is None:
        raise SafariError(f"{program} must be installed: pip install 'safari-fl[flower,net]'")
    return subprocess.Popen(
        [found, *map(str, arguments)],
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
    return os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "NO_COLOR": "1",
    }


def _wait_until_it_listens(process: subprocess.Popen[bytes], lab: Lab) -> None:
    end = time.monotonic() + _START
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection((lab.host, lab.port), 1):
            return
        time.sleep(0.2)
    words = (lab.folder / "superlink.log").read_text(errors="replace").strip().splitlines()
    raise SafariError(
        f"the SuperLink must listen on {lab.host}:{lab.port} within {_START:g} s; its last words, from "
        f"{lab.folder / 'superlink.log'}: {words[-1] if words else 'none'}"
    )


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


def _refuse_failed(lab: Lab, number: Any) -> None:
    if number is None:
        return
    runs = _flwr(lab, "list", "lab", "--run-id", number, "--format", "json").get("runs", [])
    status = str(runs[0].get("status", "")) if runs else ""
    if status.startswith("finished") and _done(lab) < int(lab.settings["rounds"]):
        raise SafariError(
            f"the run ended as {status} after {_done(lab)} of {lab.settings['rounds']} rounds; why is in "
            f"{lab.folder / 'superlink.log'}"
        )


def _records(lab: Lab) -> list[RoundRecord]:
    if not (lab.run / "config.toml").exists():
        return []
    trials = RunFolder.open(lab.run).trials()
    return trials[0].records() if trials else []


def _done(lab: Lab) -> int:
    return len(_records(lab))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, which may have sessions of their own."""
    pids = family(process.pid)
    for what in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)
        end = time.monotonic() + _GRACE
        while time.monotonic() < end and any(map(_is_there, pids)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def family(pid: int) -> list[int]:
    """A process and its descendants, which may have sessions of their own; parents first."""
    if not _is_there(pid):
        return []
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in table.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found = [pid]
    for known in found:
        found += children.get(known, [])
    return found
