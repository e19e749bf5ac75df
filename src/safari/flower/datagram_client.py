"""Models over datagrams, with Flower as the control channel: the client's end (extra: net)."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from safari.errors import SafariError
from safari.flower.arrays import packets_of, unpack_broadcast
from safari.flower.broadcast import ARRAYS, CONFIG
from safari.flower.protocol import DOWNLINK_LOST, NET_CLIENT, NET_PREFIX, SAFARI

# The client's own state: the rate that its last round has learned.
_STATE, _RATE = "safari.net", "rate"


def carry(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer a message whose model is to be fetched in datagrams; any other goes straight through.

    The training function finds the model in the message, as without datagrams, and replies with packets. These are
    sent as datagrams; the reply to the server states how many, and holds no model.
    """
    config = message.content.config_records.get(CONFIG)
    offered = {n.removeprefix(NET_PREFIX): v for n, v in (config or {}).items() if n.startswith(NET_PREFIX)}
    if config is None or not offered:
        return call_next(message, context)
    from safari.net.client import Expired
    from safari.net.offer import Offer
    from safari.net.udp import ClientSocket

    offer = Offer.read(offered)
    # The training function has no need of the secret.
    for name in offered:
        if f"{NET_PREFIX}{name}" != NET_CLIENT:
            del config[f"{NET_PREFIX}{name}"]
    rng = np.random.default_rng(int.from_bytes(offer.session, "little"))
    with ClientSocket(offer, rng=rng, rate=_learned(context)) as link:
        found = link.receive()
        if isinstance(found, Expired):
            reason = f"{found.received} of {found.needed} symbols of the model came in {offer.deadline:g} s"
            return Message(Error(DOWNLINK_LOST, reason), reply_to=message)
        message.content[ARRAYS] = unpack_broadcast(found)
        reply = call_next(message, context)
        if not reply.has_content():
            return reply
        name, packets = _packets(reply.content)
        sending = link.upload(packets)
        counts = {
            "symbols": link.received,
            "packets": sending.packets,
            "unsent": sending.unsent,
            "bytes": sending.bytes_sent,
            "rate": sending.rate,
        }
    context.state[_STATE] = ConfigRecord({_RATE: sending.rate})
    records = {key: record for key, record in reply.content.items() if key != name}
    info = dict(reply.content.config_records.get(SAFARI) or {})
    records[SAFARI] = ConfigRecord({**info, **{f"net.{key}": value for key, value in counts.items()}})
    return Message(RecordDict(records), reply_to=message)


def _packets(content: RecordDict) -> tuple[str, list[bytes]]:
    for name, record in content.array_records.items():
        found = packets_of(record)
        if found is not None:
            return name, found
    raise SafariError("the training function's reply holds no packets: use sparse or sparse_mod")


def _learned(context: Context) -> float | None:
    record: Any = context.state.config_records.get(_STATE)
    rate = record.get(_RATE) if record is not None else None
    return float(rate) if isinstance(rate, int | float) and 0 < rate < float("inf") else None
