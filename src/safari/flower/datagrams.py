"""Models over datagrams, with Flower as the control channel: the server's end (extra: net).

A round's message carries, instead of the model, where to get it: the endpoint, a secret for this client and
this round, and the deadline. The client fetches the model in datagrams, with the vectors of the client algorithm in the
same broadcast, so that it has all of it or sits the round out; it sends its update in datagrams, and
answers with counts and metrics. The blocks of the update that arrive by the deadline are aggregated.

With the secret one can read and forge the datagrams between this client and the server in this round. So no
secret is sent unless the control channel uses TLS, or `insecure=True` was given.
"""

from __future__ import annotations

import math
import socket
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from safari.errors import ConfigError, SafariError
from safari.flower.arrays import pack_broadcast
from safari.flower.broadcast import ARRAYS, CONFIG, Broadcast
from safari.flower.protocol import NET_PREFIX, node_name
from safari.net.blocks import Delivery, assemble
from safari.net.fec import Source
from safari.net.offer import LONGEST_DEADLINE, Offer
from safari.net.pace import Pacing
from safari.net.seal import Session
from safari.net.udp import ServerSocket
from safari.wire import Identity, reference_digest

# Seconds to answer a TLS handshake.
_HANDSHAKE = 10.0
# Bytes that a client may upload: twice a dense float32 model, and something for a tiny one.
_ROOM, _ROOM_FACTOR = 100_000, 8
# What a record holds: the name, the kind and the bytes of each array.
_Parts = tuple[tuple[str, str, bytes], ...]


@dataclass(frozen=True)
class Asked:
    """A node that was offered a session in the round under way."""

    message: Message
    session: Session


class Datagrams:
    """Transport of models in datagrams for `SafariStrategy(..., datagrams=Datagrams(...))`.

    Args:
        host: The name or address under which clients reach this process.
        port: The UDP port to receive at; 0: any free one.
        listen: The local address to receive at.
        public_port: The port under which clients reach it, where that is another; 0: the same.
        superlink: The address of the SuperLink, "host:port", to verify that it uses TLS.
        root_certificates: The certificates (PEM) by which the SuperNodes know it.
        insecure: Send secrets over a control channel without TLS. For simulations and isolated networks.
        client_rate: Bytes a second that each client may send; 0: it learns its rate from delays.
        server_rate: Bytes a second to all clients together; 0: a rate for each is learned.
        repair: Redundancy that each client is sent at once, as a share of the model.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        listen: str = "0.0.0.0",
        public_port: int = 0,
        superlink: str | None = None,
        root_certificates: str | Path | None = None,
        insecure: bool = False,
        client_rate: float = 0.0,
        server_rate: float = 0.0,
        repair: float = 0.05,
    ):
        problems = [
            f"{name} must be at least 0, got {value}"
            for name, value in (
                ("client_rate", client_rate),
                ("server_rate", server_rate),
                ("repair", repair),
            )
            if not (value >= 0 and math.isfinite(value))
        ]
        problems += [
            f"{name} must lie between 0 and 65535, got {value}"
            for name, value in (("port", port), ("public_port", public_port))
            if not 0 <= value <= 65535
        ]
        if not insecure and (superlink is None or root_certificates is None):
            problems.append(
                'secrets go through the control channel, which must speak TLS: name superlink ("host:port" '
                "of its Fleet API) and root_certificates, or ask for insecure=True"
            )
        if problems:
            raise ConfigError(problems)
        self.host, self.public_port, self.client_rate = host, public_port, client_rate
        self._listen, self._port, self._server_rate, self._repair = listen, port, server_rate, repair
        self._control = None if insecure else (str(superlink), Path(str(root_certificates)))
        self._socket: ServerSocket | None = None
        self._asked: dict[int, Asked] = {}

    @property
    def port(self) -> int:
        """The UDP port, once open."""
        return self._port if self._socket is None else self._socket.port

    @property
    def counts(self) -> dict[str, int]:
        """Datagrams received so far: how many were accepted, and how many dropped for which reason."""
        if self._socket is None:
            return {}
        found = self._socket.counts
        return {"accepted": found.accepted, **{reason.value: n for reason, n in found.dropped.items() if n}}

    @property
    def heard(self) -> bool:
        """Has any node sent a datagram in the round under way?"""
        sessions = [asked.session.id for asked in self._asked.values()]
        return self._socket is not None and any(self._socket.look(session).asked for session in sessions)

    def open(self) -> None:
        """Check the control channel and begin to receive. May be called again."""
        if self._socket is None:
            if self._control is not None:
                check_tls(*self._control)
            self._socket = ServerSocket(self._listen, self._port, repair=self._repair)

    def close(self) -> None:
        """Free the port."""
        if self._socket is not None:
            self._socket.stop()
            self._socket = None

    def announce(self, messages: Sequence[Message], sent: Broadcast, timeout: float) -> list[Message]:
        """The round's messages, with an offer instead of the model; sessions are open from now on."""
        self.open()
        if self._socket is None:
            raise SafariError("the data port must be open: it is not")
        self._end_round()
        # One for all, unless the client algorithm sends each client something of its own.
        sources: dict[_Parts, Source] = {}
        round, model = sent.instructions.round, reference_digest(_reference(sent))
        pacing = Pacing(rate=self._server_rate / len(messages)) if self._server_rate and messages else None
        out = []
        for message in messages:
            node = message.metadata.dst_node_id
            session = Session.fresh(Identity(node_name(node), round, model))
            source = _source(message, sources)
            offer = Offer(
                host=self.host,
                port=self.public_port or self.port,
                session=session.id,
                secret=session.secret,
                client=session.identity.client,
                round=round,
                model=model,
                size=source.shape.size,
                digest=source.shape.digest,
                deadline=min(float(timeout), LONGEST_DEADLINE),
                rate=float(self.client_rate),
            )
            self._socket.open(session, source, _ROOM + _ROOM_FACTOR * sent.layout.size, pacing)
            entries = {f"{NET_PREFIX}{name}": value for name, value in offer.plain().items()}
            table = ConfigRecord({**message.content.config_records[CONFIG], **entries})
            meta = message.metadata
            announced = Message(
                RecordDict({CONFIG: table}), dst_node_id=node, message_type=meta.message_type, ttl=meta.ttl
            )
            self._asked[node] = Asked(announced, session)
            out.append(announced)
        return out

    def settle(self, replies: Iterable[Message], deadline: float) -> None:
        """Wait for what is on its way from those that have answered, at most until `deadline` by `clock`."""
        if self._socket is None:
            return
        by_message = {asked.message.metadata.message_id: node for node, asked in self._asked.items()}
        nodes = [by_message.get(r.metadata.reply_to_message_id) for r in replies if r.has_content()]
        sessions = [self._asked[node].session.id for node in nodes if node is not None]
        self._socket.settle(sessions, deadline)

    def collect(self, sent: Broadcast) -> dict[int, Delivery]:
        """The received part of each node's update, by node; ends the round's sessions."""
        found = {}
        for node, asked in self._asked.items():
            if self._socket is not None:
                upload = self._socket.close(asked.session.id)
                found[node] = assemble(upload, sent.shared, asked.session.identity)
        self._asked = {}
        return found

    def unanswered(self, replies: Iterable[Message]) -> dict[int, Message]:
        """The messages of the round under way to which there is no reply, by node."""
        answered = {reply.metadata.reply_to_message_id for reply in replies}
        messages = {node: asked.message for node, asked in self._asked.items()}
        return {node: m for node, m in messages.items() if m.metadata.message_id not in answered}

    def _end_round(self) -> None:
        for asked in self._asked.values():
            if self._socket is not None:
                self._socket.close(asked.session.id)
        self._asked = {}


def check_tls(address: str, root_certificates: Path) -> None:
    """SafariError unless there is a server at "host:port" that proves itself by these certificates."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"superlink must be host:port, got {address!r}")
    try:
        context = ssl.create_default_context(cafile=str(root_certificates))
    except (OSError, ssl.SSLError) as error:
        raise SafariError(f"root_certificates {root_certificates} cannot be read: {error}") from error
    context.set_alpn_protocols(["h2", "http/1.1"])
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), _HANDSHAKE) as plain:
            plain.settimeout(_HANDSHAKE)
            with context.wrap_socket(plain, server_hostname=host):
                pass
    except ssl.SSLError as error:
        raise SafariError(
            f"the SuperLink at {address} must speak TLS with a certificate of {root_certificates}, or no "
            f"secret is sent: {error.reason or error}"
        ) from error
    except OSError as error:
        raise SafariError(f"the SuperLink at {address} cannot be reached: {error}") from error


def _source(message: Message, known: dict[_Parts, Source]) -> Source:
    """Encode a message's arrays as symbols, once for all messages that hold the same.

    The parts are the key: `bytes` keep their hash and are equal to themselves at a glance, so that a model that the
    messages share is neither copied nor read again for each.
    """
    record = message.content.array_records[ARRAYS]
    parts = tuple((name, array.stype, array.data) for name, array in record.items())
    if parts not in known:
        known[parts] = Source(pack_broadcast(record))
    return known[parts]


def _reference(sent: Broadcast) -> Any:
    if sent.shared.reference is None:
        raise SafariError("datagrams need a broadcast with its model as reference")
    return sent.shared.reference
