"""`safari net serve` and `safari net join` as real processes in network namespaces, through one bad network after
another, and then the simulator on the same arrivals.

    PYTHONPATH=src:tests python tests/net/end_to_end.py results/net/namespaces.json

needs root, takes about half an hour on two cores and leaves nothing behind but the file.
"""

from __future__ import annotations

import json
import os
import platform
import ssl
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

import safari
from net.namespaces import RELAY, SERVER, Network, address, why_not
from processes import wait_until
from safari.runs import RunFolder

CONTROL, DATA = 8000, 8001
RULE = "safari+"
# What comes from elsewhere: inside a machine nothing is lost.
EVERYTHING = 'iifname != "lo" meta l4proto { tcp, udp }'


@dataclass(frozen=True)
class Phase:
    """Some rounds under the same conditions.

    Args:
        name: What is done to the network.
        rounds: How many rounds it lasts.
        begin: Makes it so.
        loss: The share of datagrams that should be lost in each direction; None: not checked.
    """

    name: str
    rounds: int
    begin: Callable[[Network], None]
    loss: float | None = None


def cut_uplink(network: Network) -> None:
    """Nothing of the last client's datagrams reaches the server; its control channel does."""
    network.rule("server", f"ip saddr {address(network.clients - 1)} meta l4proto udp drop")


def through_the_relay(network: Network) -> None:
    """Datagrams take the way over the relay, which holds them back for five seconds in each direction."""
    network.start(
        "relay",
        "relay",
        sys.executable,
        Path(__file__).with_name("slow_relay.py"),
        RELAY,
        SERVER,
        CONTROL,
        DATA,
        5,
    )
    wait_until("the relay", lambda: "ready" in network.log("relay"), 60)
    for i in range(network.clients):
        network.redirect(f"client-{i}", f"udp dport {DATA} ip daddr {SERVER} dnat to {RELAY}:{DATA}")


PHASES = (
    Phase("no loss", 2, lambda network: None, 0.0),
    Phase("30% of all packets, control channel included", 4, lambda network: network.lose(30, EVERYTHING), 0.3),
    Phase("bursts of 12 datagrams, 30%", 4, lambda network: network.lose_in_bursts(30, 12), 0.3),
    Phase("uplink of client 2 cut", 3, cut_uplink),
    Phase("total blackout", 10, lambda network: network.black_out(), 1.0),
    Phase("back again", 3, lambda network: None, 0.0),
    Phase("60% of all datagrams", 3, lambda network: network.lose(60), 0.6),
    Phase("5 s one-way latency", 3, through_the_relay, 0.0),
)  # fmt: skip


@dataclass(frozen=True)
class Played:
    """A phase as it went: rounds from 1, and what came of the packets of clients that trained."""

    name: str
    first: int
    last: int
    arrived: int
    asked: int
    packets: int
    of: int
    top1: float


def play(
    folder: Path, phases: tuple[Phase, ...] = PHASES, clients: int = 3, deadline: float = 60.0, **more: str
) -> dict:
    """Run it all; what happened, and the accuracy of the simulator on the same arrivals.

    `more`: further options of `safari net serve`.
    """
    lab, rounds, began = folder / "lab", sum(phase.rounds for phase in phases), time.monotonic()
    run, changes = lab / "run", []
    with Network(clients, folder) as network, network.explained():
        options = {
            "clients": clients, "rounds": rounds, "deadline": deadline, "rule": RULE, "host": SERVER,
            "port": CONTROL, "data-port": DATA, "out": lab, **more,
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        network.start("server", "server", sys.executable, "-m", "safari", "net", "serve", *words)
        invited = wait_until("invitations", lambda: _invitations(network.log("server"), clients), 300)
        for i, command in enumerate(invited):
            network.start(f"node-{i}", f"client-{i}", sys.executable, "-m", *command)
        outsider = network.inside("relay", lambda: attack(lab))
        wait_until("the run's folder", (run / "config.toml").exists, 600)
        done = 0
        for phase in phases:
            network.clear()
            phase.begin(network)
            done += phase.rounds
            # The round under way when the network changes belongs to neither phase.
            changes.append(len(_records(run)) + 1)
            limit = 300 + 4 * deadline * phase.rounds
            wait_until(phase.name, lambda done=done: len(_records(run)) >= done, limit, pause=0.2)
        wait_until("the end", lambda: "done: " in network.log("server"), 300)
    seconds, records = time.monotonic() - began, _records(run)
    played = [
        _played(phase, first, last, records)
        for phase, first, last in zip(phases, changes, [*(c - 1 for c in changes[1:]), rounds], strict=True)
    ]
    simulated = [record["top1"] for record in simulate(run, folder / "simulated")]
    network_top1 = [record["top1"] for record in records]
    return {
        "clients": clients,
        "rounds": rounds,
        "deadline": deadline,
        "seconds": round(seconds, 1),
        "phases": [asdict(p) for p in played],
        "top1": {"network": network_top1[-1], "simulator": simulated[-1]},
        "largest_difference": max(abs(a - b) for a, b in zip(network_top1, simulated, strict=True)),
        "datagrams": records[-1]["datagrams"],
        "outsider": outsider,
    }


def simulate(run: Path, out: Path) -> list:
    """The records of a simulation in which the same coordinates of the same clients arrive as in a run."""
    table = tomllib.loads((run / "config.toml").read_text())
    (rounds,) = run.glob("trials/*/seed-0/rounds.jsonl")
    table["packets"] = {"name": "recorded", "file": str(rounds)}
    table["evaluation"] = {"every": 1}
    safari.run(table, out, progress=False, report=False)
    return _records(out)


def _records(run: Path) -> list:
    if not (run / "config.toml").exists():
        return []
    trials = RunFolder.open(run).trials()
    return trials[0].records() if trials else []


def attack(lab: Path) -> dict[str, str]:
    """What an outsider is told who lists runs at the address of the clients, and at the SuperLink's own port."""
    control = tomllib.loads((lab / "flwr" / "config.toml").read_text())["superlink"]["lab"]["address"]
    context = ssl.create_default_context(cafile=lab / "certificates" / "ca.crt")
    found = {}
    for name, port in (("gate", CONTROL), ("superlink", int(control.rpartition(":")[2]))):
        try:
            with httpx.Client(verify=context, trust_env=False, timeout=10) as client:
                headers = {"content-type": "application/protobuf"}
                answer = client.post(f"https://{SERVER}:{port}/v1/control/list-runs", headers=headers)
            found[name] = str(answer.status_code)
        except httpx.ConnectError as error:
            found[name] = str(error)
    return found


def _invitations(log: str, clients: int) -> list[list[str]] | None:
    """The commands that the server has printed, by client; None before all are there."""
    found = [line.split() for line in log.splitlines() if "safari net join" in line]
    return found if len(found) == clients else None


def _played(phase: Phase, first: int, last: int, records: list) -> Played:
    # The first round may have begun before the change.
    chosen = records[first:last] if last > first else records[first - 1 : last]
    blocks = [block for record in chosen for block in record.get("blocks", {}).values()]
    return Played(
        phase.name,
        first,
        last,
        sum(len(record["arrived"]) for record in chosen),
        sum(len(record["arrived"]) + len(record["missing"]) for record in chosen),
        sum(block["packets"] for block in blocks),
        sum(block["of"] for block in blocks),
        records[last - 1]["top1"],
    )


def main(out: Path) -> None:
    reason = why_not()
    if reason is not None:
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder:
        found = play(Path(folder))
    import flwr
    import torch

    found["machine"] = {"cores": os.cpu_count(), "system": platform.system()}
    found["versions"] = {
        "python": platform.python_version(),
        "flwr": flwr.__version__,
        "torch": torch.__version__,
    }
    found["command"] = "PYTHONPATH=src:tests python tests/net/end_to_end.py results/net/namespaces.json"
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
