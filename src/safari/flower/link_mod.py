"""A client mod that drops messages according to a link model: an unreliable network for simulations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from safari.errors import SafariError
from safari.flower.protocol import DOWNLINK_LOST, PARTITION_ID, UPLINK_LOST
from safari.links import LINKS, Link, Setting, checked_link
from safari.plugins import check_options, resolve
from safari.seeds import generator

Options = Mapping[str, Any]


@dataclass(frozen=True)
class LinkSchedule:
    """Which clients' messages are delivered in which round: the draws of our own engines for the same seed.

    `direction`: "uplink" or "downlink". `label_counts`: samples of each label by client, for links that
    depend on them.
    """

    link: Link
    direction: str
    clients: int
    seed: int
    label_counts: np.ndarray | None = None

    def delivered(self, round: int) -> np.ndarray:
        """One bool per client. Links with a state are replayed from the first round, so that every process
        computes the same, in whatever order it asks."""
        counts = np.zeros((self.clients, 1), int) if self.label_counts is None else self.label_counts
        setting = Setting(self.clients, counts, generator(self.seed, self.direction))
        link = checked_link(self.link, self.direction, self.clients)
        state = link.init(setting)
        for t in range(round + 1):
            found, state = link.apply(state, t, generator(self.seed, self.direction, t))
        return found


def lossy(
    uplink: str | Link = "bernoulli",
    downlink: str | Link = "perfect",
    *,
    seed: int = 0,
    uplink_options: Options | None = None,
    downlink_options: Options | None = None,
    label_counts: np.ndarray | None = None,
) -> Mod:
    """A mod that drops `train` messages according to a link model; put it before all others.

    `uplink`, `downlink`: the name of a link model, or a Link. `uplink_options`, `downlink_options`: its
    options. `seed`: of the draws, which are those of our own engines. `label_counts`: samples of each label
    by client, for the link `labels`.

    A message dropped on the downlink is answered with an error at once, one dropped on the uplink after the
    client has trained. (A mod that returns nothing would end its node for the rest of the run.) Nodes need a
    `partition-id` and `num-partitions`, as in Flower's simulation.
    """
    up = _link("uplink", uplink, uplink_options or {}, label_counts)
    down = _link("downlink", downlink, downlink_options or {}, label_counts)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        client, clients = _place(context)
        round = _round(message)
        if not LinkSchedule(down, "downlink", clients, seed, label_counts).delivered(round)[client]:
            return Message(Error(DOWNLINK_LOST, "lost on the downlink"), reply_to=message)
        reply = call_next(message, context)
        if not LinkSchedule(up, "uplink", clients, seed, label_counts).delivered(round)[client]:
            return Message(Error(UPLINK_LOST, "lost on the uplink"), reply_to=message)
        return reply

    return mod


def _link(field: str, link: str | Link, options: Options, label_counts: np.ndarray | None) -> Link:
    if isinstance(link, Link):
        return link
    factory: Callable[..., Link] = resolve("link", field, link, LINKS)
    problems = check_options(field, factory, options)
    if problems:
        raise SafariError("\n".join(problems))
    if link == "labels" and label_counts is None:
        raise SafariError(f"{field}: the link labels needs label_counts")
    return factory(**options)


def _place(context: Context) -> tuple[int, int]:
    client, clients = (context.node_config.get(name) for name in (PARTITION_ID, "num-partitions"))
    if not isinstance(client, int) or not isinstance(clients, int) or not 0 <= client < clients:
        raise SafariError(
            f"lossy needs whole numbers {PARTITION_ID} and num-partitions in the node's config, "
            f"got {client!r} and {clients!r}"
        )
    return client, clients


def _round(message: Message) -> int:
    """The round, from 0, as every message-based strategy of Flower states it."""
    for record in message.content.config_records.values():
        number = record.get("server-round")
        if isinstance(number, int) and number >= 1:
            return number - 1
    raise SafariError("lossy needs server-round in the message's config")
