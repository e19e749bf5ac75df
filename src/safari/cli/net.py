"""`safari net`."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

# Lines for clients on the terminal; the rest are in a file.
_SHOWN = 10


@click.group(short_help="Train over datagrams on a local network.")
def net() -> None:
    """Train over best-effort datagrams: a ready example, one command on each machine.

    The server makes certificates, starts a Flower SuperLink and waits for the clients. Each client joins
    with the line that the server prints for it. They train on the embedded digits; models go in encrypted UDP
    datagrams, and what of them arrives by the deadline counts.
    """


@net.command(short_help="Start the server of the lab example.")
@click.option(
    "--clients", type=click.IntRange(2, 1000), default=3, show_default=True, help="How many will join."
)
@click.option(
    "--rounds", type=click.IntRange(1), default=20, show_default=True, help="How many to train for."
)
@click.option(
    "--deadline",
    type=click.FloatRange(1),
    default=60.0,
    show_default=True,
    help="Seconds that a round lasts at most.",
)
@click.option("--rule", default="safari+", show_default=True, help="What to do about what is missing.")
@click.option("--model", default="cnn", show_default=True, help="The model; see 'safari list model'.")
@click.option(
    "--sparsity",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.8,
    show_default=True,
    help="The fraction cut.",
)
@click.option(
    "--preset",
    type=click.Choice(["best"]),
    help="Settings that belong together, under the other options; see 'safari run --help'.",
)
@click.option(
    "--values",
    help="As wire.values; see 'safari init -'.  [default: auto, or the preset's]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Everything random follows from it.")
@click.option("--host", help="The name or address of this machine for the clients.  [default: found out]")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="TCP, for control."
)
@click.option(
    "--data-port", type=click.IntRange(1, 65535), default=8001, show_default=True, help="UDP, for models."
)
@click.option(
    "--client-rate", type=click.FloatRange(0), default=0.0, show_default=True,
    help="Bytes a second that each client may send; 0: learned.",
)  # fmt: skip
@click.option(
    "--server-rate", type=click.FloatRange(0), default=0.0, show_default=True,
    help="Bytes a second to all clients together; 0: learned.",
)  # fmt: skip
@click.option(
    "--wait",
    type=click.FloatRange(1),
    default=3600.0,
    show_default=True,
    help="Seconds to wait for all clients.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("runs/net-lab"),
    show_default=True, help="The folder for certificates, logs and the run; a run that is there goes on.",
)  # fmt: skip
def serve(host: str | None, port: int, data_port: int, out: Path, rounds: int, **settings: Any) -> None:
    """Start a SuperLink with TLS and node keys, wait for the clients and train.

    Clients reach a gate that passes on what SuperNodes with an invited key call, and nothing else: apps can be
    submitted from this machine alone. Each printed line has a token that is good for one client: hand it to that
    client alone. Clients run the app that this command submits, and so trust whoever runs it.

    SIGTERM ends it with exit code 0, Ctrl-C with 130; the same command goes on with the run.

    \b
    Example, and what to run on each client is printed:
      safari net serve --clients 3
    """
    from safari.lab.app import check as check_settings
    from safari.lab.launch import (
        Lab,
        check_ports,
        follow,
        own_address,
        rounds_done,
        superlink,
        wait_until_free,
    )

    # A run config has no place for None.
    table = {name.replace("_", "-"): "" if value is None else value for name, value in settings.items()}
    table["rounds"] = rounds
    # Report errors here rather than in the log of another process.
    lab = Lab(out, host or own_address(), port, data_port, table)
    check_settings(table, lab.run)
    wait_until_free(lab)
    check_ports(lab)
    lab.prepare()
    clients = settings["clients"]
    click.echo(
        f"server: {lab.host}, TCP port {port} for control and UDP port {data_port} for models", err=True
    )
    with _until_terminated(), superlink(lab) as check_processes:
        click.echo(f"on the {clients} clients, each line on one of them:", err=True)
        for client in range(min(clients, _SHOWN)):
            click.echo(f"  {lab.invitation(client)}", err=True)
        if clients > _SHOWN:
            click.echo(f"  ... and so on: {lab.invitations.folder / 'commands.txt'}", err=True)
        done = rounds_done(lab)
        if done < rounds:
            again = ", those of before with the same lines" if done else ""
            click.echo(f"round {done + 1} of {rounds} begins when all {clients} have joined{again}", err=True)
        follow(lab, check_processes, lambda record: click.echo(_line(record, rounds)))
    click.echo(f"done: safari show {shlex.quote(str(lab.run))}", err=True)


@contextlib.contextmanager
def _until_terminated() -> Iterator[None]:
    """End orderly on SIGTERM, with exit code 0: what is done is on the disk."""
    from safari.processes import TerminatedError

    try:
        yield
    except TerminatedError:
        click.echo("stopped by SIGTERM; the same command goes on", err=True)
        raise SystemExit(0) from None


@net.command(short_help="Join the lab example as a client.")
@click.argument("server", metavar="HOST:PORT")
@click.option("--client", type=click.IntRange(0), required=True, help="Which client this is, from 0.")
@click.option("--clients", type=click.IntRange(1), required=True, help="How many there are.")
@click.option(
    "--token",
    required=True,
    envvar="SAFARI_NET_TOKEN",
    show_envvar=True,
    help="This client's, as the server has printed it.",
)
@click.option("--fingerprint", help="The server's, as it has printed it.")
@click.option(
    "--certificate", type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Or the certificate of the server's authority (ca.crt).",
)  # fmt: skip
def join(
    server: str, client: int, clients: int, token: str, fingerprint: str | None, certificate: Path | None
) -> None:
    """Join the server at HOST:PORT as a client, and train until Ctrl-C.

    Makes a key for this client, which stays on this machine, and shows the server its public half together with the
    token. The app that the server submits then runs here with your rights: join only a server whose operator you trust.

    \b
    Example, as the server prints it:
      safari net join 192.168.1.10:8000 --client 0 --clients 3 --fingerprint 3f9a... --token 5d01...
    """
    from safari.lab.launch import join as join_lab

    if client >= clients:
        raise click.UsageError(f"--client must lie between 0 and {clients - 1}, got {client}")
    code = join_lab(
        server,
        client,
        clients,
        token=token,
        known_by=fingerprint,
        certificate=certificate,
        tell=lambda text: click.echo(text, err=True),
    )
    if code:
        raise click.ClickException(f"the SuperNode ended with exit code {code}; it says why above")
    # Flower's SuperNode ends like this, without a word, when the SuperLink has started anew and given it another id.
    click.echo(
        "the SuperNode has ended: where the server has started again, join with the same command", err=True
    )


_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)


@net.command(short_help="Put a gate in front of a SuperLink of your own.")
@click.option(
    "--superlink", metavar="HOST:PORT", default="127.0.0.1:9091", show_default=True,
    help="Where it listens; nobody else should reach it there.",
)  # fmt: skip
@click.option(
    "--authority", type=_FILE, required=True, help="The certificate that the SuperLink's is signed with."
)
@click.option(
    "--certificate", type=_FILE, required=True, help="What the gate shows to devices, with its chain."
)
@click.option("--key", type=_FILE, required=True, help="The certificate's key.")
@click.option("--host", default="0.0.0.0", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="TCP, for devices."
)
@click.option(
    "--devices", type=click.IntRange(1, 100_000), default=100, show_default=True,
    help="About how many; beyond that, connections are refused.",
)  # fmt: skip
# What `safari net serve` adds for its own clients.
@click.option("--invitations", type=click.Path(path_type=Path, file_okay=False, exists=True), hidden=True)
@click.option("--app", "apps", multiple=True, hidden=True)
def gate(
    superlink: str,
    authority: Path,
    certificate: Path,
    key: Path,
    host: str,
    port: int,
    devices: int,
    invitations: Path | None,
    apps: tuple[str, ...],
) -> None:
    """Pass on what SuperNodes with registered keys call, and nothing else.

    A SuperLink has the API with which apps are submitted, and so code is run, on the same port as the one for
    SuperNodes. Start it with --host 127.0.0.1 and --enable-supernode-auth, and this in front of it.

    \b
    Example:
      safari net gate --authority ca.crt --certificate server.crt --key server.key
    """
    from safari.lab.gate import Gate
    from safari.lab.gate import serve as serve_gate
    from safari.lab.invitations import open_invitations
    from safari.net.certificates import Certificates

    name, _, number = superlink.rpartition(":")
    if not name or not number.isdecimal():
        raise click.UsageError(f"--superlink must be host:port, got {superlink!r}")
    found = Gate(
        superlink,
        authority,
        open_invitations(invitations, devices) if invitations is not None else None,
        frozenset(apps) or None,
        lambda text: click.echo(text, err=True),
    )
    found.register_known()
    told = f"{host}, TCP port {port}: Fleet calls for {superlink}, and nothing else"
    files = Certificates(authority, certificate, key)
    serve_gate(found, host, port, files, devices, lambda: click.echo(told, err=True))


def _line(record: Mapping[str, Any], rounds: int) -> str:
    """A round in one line: accuracy, and the packets received from each client."""
    blocks = record.get("blocks") or {}
    shares = [f"client {client}: {block['packets']}/{block['of'] or '?'}" for client, block in blocks.items()]
    received = ", ".join(shares) or "no client is connected"
    score = record.get("top1")
    top1 = f"{100 * score:5.1f} %" if score is not None else "      -"
    return f"round {record['round']:>4} of {rounds}   top-1 {top1}   packets received: {received}"
