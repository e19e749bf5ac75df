"""A client mod that drops messages according to a link model: an unreliable network for simulations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from safari.errors import SafariError
from safari.flower.protocol import DOWNLINK_LOST, PARTITION_ID, UPLINK_LOST
from safari.kinds import guarded
from safari.links import LINKS, Link, Setting, link_contract
from safari.seeds import generator

Options = Mapping[str, Any]


@dataclass(frozen=True)
class LinkSchedule:
    """Which clients' messages are delivered in which round: the draws of our own engines for the same seed.

    `direction`: "uplink" or "downlink". `label_counts`: samples of each label by client, for links that
    depend on them. The answer for a round does not depend on which rounds were asked about before; the state
    after the last of them is kept, so that rounds in order cost one step each.
    """

    link: Link
    direction: str
    clients: int
    seed: int
    label_counts: np.ndarray | None = None
    # (round, delivered, the link's state after it) of the last answer, or nothing. One tuple, replaced whole:
    # two threads may each compute the same, and neither sees half of the other's.
    _last: list[tuple[int, np.ndarray, dict[str, np.ndarray]]] = field(
        default_factory=list, init=False, compare=False, repr=False
    )

    def delivered(self, round: int) -> np.ndarray:
        """One bool per client. A link with a state is replayed from the last round that was asked about, or from
        the first where this one is earlier, so that every process computes the same in whatever order it asks."""
        link = guarded(self.link, link_contract(self.clients), self.direction)
        last = self._last[:]
        if last and last[0][0] <= round:
            done, found, state = last[0]
        else:
            counts = np.zeros((self.clients, 1), int) if self.label_counts is None else self.label_counts
            done, found = -1, np.zeros(self.clients, bool)
            state = link.init(Setting(self.clients, counts, generator(self.seed, self.direction)))
        for t in range(done + 1, round + 1):
            found, state = link.apply(state, t, generator(self.seed, self.direction, t))
        self._last[:] = [(round, found, state)]
        return found.copy()


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

    # A plain dict: Flower's simulation pickles mods, which functools.cache would not survive.
    schedules: dict[int, tuple[LinkSchedule, LinkSchedule]] = {}

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        client, clients = _place(context)
        round = _round(message)
        if clients not in schedules:
            schedules[clients] = (
                LinkSchedule(down, "downlink", clients, seed, label_counts),
                LinkSchedule(up, "uplink", clients, seed, label_counts),
            )
        downward, upward = schedules[clients]
        if not downward.delivered(round)[client]:
            return Message(Error(DOWNLINK_LOST, "lost on the downlink"), reply_to=message)
        reply = call_next(message, context)
        if not upward.delivered(round)[client]:
            return Message(Error(UPLINK_LOST, "lost on the uplink"), reply_to=message)
        return reply

    return mod


def _link(field: str, link: str | Link, options: Options, label_counts: np.ndarray | None) -> Link:
    if isinstance(link, Link):
        return link
    if link == "labels" and label_counts is None:
        raise SafariError(f"{field}: the link labels needs label_counts")
    return LINKS.build(link, options, field)


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
