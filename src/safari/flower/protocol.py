"""Records that accompany models from the server and from clients: small, and checked when read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from flwr.app import ConfigRecord, Context

from safari.errors import SafariError, one_of
from safari.pruning import PRUNERS
from safari.text import visible
from safari.wire import ValueMode

PROTOCOL = 4
# What a client says is a record of this name. What the server says is in the one record "config", under names
# that begin with it: Flower's own mods accept no message with a second config record.
SAFARI = "safari"
_PREFIX = f"{SAFARI}."
REMEMBER = f"{_PREFIX}remember"
CLIENT_ID = "safari-id"
PARTITION_ID = "partition-id"
UPLOADS = ("frame", "dense")
# Another one, for clients that were offered datagrams: packets of the wire format.
PACKETS = "packets"
# Entries of a message's config that offer them.
NET_PREFIX = f"{_PREFIX}net."
NET_CLIENT = f"{NET_PREFIX}client"
# Codes of error replies, beyond Flower's own: lost on the way by `lossy`, or not to be made sense of.
UPLINK_LOST = 1001
DOWNLINK_LOST = 1002
UNREADABLE = 1003
# How a client finds its mask: from the model alone, by the score that the server names; the mask that was
# announced; that one, moved by its own gradient; or by the score within it.
WORKED_OUT, SHARED, OWN, SCORED = MASKS = ("worked-out", "shared", "own", "scored")


@dataclass(frozen=True)
class Instructions:
    """A round's instructions: all that a client needs besides the model to do the same as every other client.

    `round` counts from 0; `layout`, `model` and `predicted` are the digests of the wire layout, of the model
    and of the mask that the server expects, so that both ends know what they share before a frame relies on
    it. `remember`: the next round may build on this one's model. `feedback`: the client adds to its upload
    what earlier ones left out; `heard` is the last round in which the server heard this client, or -1, and `came`
    has a bit for each packet of that upload, 1 where it arrived; empty where all did.
    `upload`: "frame", "dense" for plain arrays, or "packets" for datagrams.

    `pruner`, `sparsity`, `scope`, `dense` and `least` say how a score makes a mask in this round. `masks`: how
    the client finds its own, one of `MASKS`; all but the first say that a mask came with the model. `moves` and
    `votes`: how many weights of each layer a client moves by itself and votes for; none where it does not.
    `client` and `options`: the client algorithm by name, and its options as JSON. `lr`: the learning rate of this
    round's local steps, where the server reads gradients off the updates; 0 where clients choose it themselves.
    """

    round: int
    pruner: str
    sparsity: float
    scope: str
    dense: str
    least: float
    masks: str
    moves: str
    votes: str
    client: str
    options: str
    lr: float
    seed: int
    values: str
    bits: int
    step: float
    ratio: float
    fraction: float
    threshold: float
    layout: bytes
    model: bytes
    predicted: bytes
    remember: bool
    feedback: bool
    heard: int
    came: bytes
    upload: str

    def entries(self) -> dict[str, Any]:
        """The instructions as they travel: entries of the message's config."""
        return {f"{_PREFIX}{name}": value for name, value in {"protocol": PROTOCOL, **asdict(self)}.items()}

    @classmethod
    def read(cls, config: Mapping[str, Any] | None) -> Instructions:
        """The instructions in a message's config; SafariError names what is wrong with them."""
        record = {n.removeprefix(_PREFIX): v for n, v in (config or {}).items() if n.startswith(_PREFIX)}
        check_protocol(record or None, "the server")
        values: dict[str, Any] = {}
        for field in fields(cls):
            value = record.get(field.name)
            kind = {"int": int, "float": float, "str": str, "bytes": bytes, "bool": bool}[str(field.type)]
            if type(value) is not kind:
                got = visible(repr(value), 60)
                raise SafariError(f"{SAFARI}.{field.name} must be {field.type}, got {got}")
            values[field.name] = value
        instructions = cls(**values)
        if instructions.values not in tuple(ValueMode):
            raise SafariError(one_of("values", instructions.values, [mode.value for mode in ValueMode]))
        if instructions.upload not in (*UPLOADS, PACKETS):
            raise SafariError(one_of("upload", instructions.upload, (*UPLOADS, PACKETS)))
        if instructions.masks not in MASKS:
            raise SafariError(one_of("masks", instructions.masks, MASKS))
        if not 0 <= instructions.lr < math.inf:
            raise SafariError(f"{_PREFIX}lr must be at least 0 and finite, got {instructions.lr}")
        return instructions

    @property
    def announced(self) -> bool:
        """Did a mask come with the model?"""
        return self.masks != WORKED_OUT

    def counts(self, name: str, layers: int) -> list[int] | None:
        """`moves` or `votes`: a number for each prunable layer; None where there are none."""
        found = self._json(name, list)
        if found and (len(found) != layers or any(type(n) is not int or n < 0 for n in found)):
            raise SafariError(f"{_PREFIX}{name} must hold {layers} counts, got {visible(repr(found), 60)}")
        return found or None

    def dense_layers(self) -> list[str]:
        """The layers of which nothing is cut."""
        return [str(name) for name in self._json("dense", list)]

    def client_options(self) -> dict[str, Any]:
        """The options of the client algorithm."""
        found: dict[str, Any] = self._json("options", dict)
        return found

    def _json(self, name: str, kind: type) -> Any:
        text = getattr(self, name)
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SafariError(f"{_PREFIX}{name} must be JSON, got {visible(text, 60)!r}") from error
        if not isinstance(found, kind):
            raise SafariError(f"{_PREFIX}{name} must be a {kind.__name__}, got {visible(text, 60)!r}")
        return found


@dataclass(frozen=True)
class ClientInfo:
    """A client's information about itself in its reply: its name and, with plain arrays, the mask that it
    trained with, a bit for each weight that may be cut."""

    client: str
    mask: bytes = b""

    def record(self) -> ConfigRecord:
        """The information as it travels."""
        mask = {"mask": self.mask} if self.mask else {}
        return ConfigRecord({"protocol": PROTOCOL, "client": self.client, **mask})

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> ClientInfo:
        """The information in a reply; SafariError names what is wrong with it."""
        check_protocol(record, "the client")
        client, mask = record.get("client"), record.get("mask", b"")
        if not isinstance(client, str) or not 0 < len(client) <= 200 or not client.isprintable():
            got = visible(repr(client), 60)
            raise SafariError(f"{SAFARI}.client must be a printable text of 1 to 200 characters, got {got}")
        if not isinstance(mask, bytes):
            raise SafariError(f"{SAFARI}.mask must be bytes, got {type(mask).__name__}")
        return cls(client, mask)


def check_protocol(record: Mapping[str, Any] | None, who: str) -> None:
    """Raise unless the other end speaks this version."""
    if record is None:
        raise SafariError(f"the message holds nothing of {SAFARI}: {who} does not use safari.flower")
    if record.get("protocol") != PROTOCOL:
        raise SafariError(
            f"{SAFARI}.protocol must be {PROTOCOL}, {who} has {visible(repr(record.get('protocol')), 60)}: "
            "install the same safari-fl on both ends"
        )


def known_pruner(name: str) -> None:
    """Raise unless the name is a built-in's: no name that came over a network is ever imported."""
    if name not in PRUNERS:
        raise SafariError(one_of("pruner", name, PRUNERS) + "; your own goes into sparse(..., pruner=)")


def identity(context: Context) -> str:
    """The name under which a client is known in all rounds, runs and restarts.

    `safari-id` of the node's config where there is one, else its `partition-id`, else the node's id, which
    lasts only where node keys are registered.
    """
    for name in (CLIENT_ID, PARTITION_ID):
        if name in context.node_config:
            return str(context.node_config[name])
    return node_name(context.node_id)


def node_name(node: int) -> str:
    """The name of a node that gave none."""
    return f"node-{node}"
