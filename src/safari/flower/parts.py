"""Models that arrive in part: what the strategy needs of datagrams where it does not need their library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import Message, MetricRecord, RecordDict
from torch import Tensor

from safari.errors import ConfigError
from safari.flower.protocol import SAFARI, ClientInfo

if TYPE_CHECKING:
    from safari.flower.datagrams import Datagrams
    from safari.flower.reply import Reply
    from safari.net.blocks import Delivery

_MOST_RANGES = 5_000


def reply_without_words(message: Message, name: str) -> Message:
    """A substitute for a reply that did not come, from a node whose model came in packets."""
    content = RecordDict({"metrics": MetricRecord(), SAFARI: ClientInfo(name).record()})
    return Message(content, reply_to=message)


def check_datagrams(datagrams: Datagrams | None, download: str, upload: str) -> None:
    """ConfigError for what does not go together with datagrams."""
    if datagrams is None:
        return
    for name, value in (("download", download), ("upload", upload)):
        if value != "frame":
            raise ConfigError(f"{name} must be 'frame' with datagrams, got {value!r}")


def complete_masks(replies: Mapping[int, Reply], expected: Tensor) -> dict[int, Reply]:
    """Replies that came in part with their whole masks, where all clients have the same one.

    A packet states the mask of its own coordinates only. Those of the others are taken from clients whose packets
    came, and where nobody's did from `expected`, the mask that the server predicts. Where two clients state
    different masks they do not have the same one, and the replies stay as they are.
    """
    parts = [reply for reply in replies.values() if reply.came is not None]
    if not parts:
        return dict(replies)
    masks = torch.stack([reply.mask for reply in replies.values()])
    came = torch.stack([torch.ones_like(r.mask) if r.came is None else r.came for r in replies.values()])
    kept, cut = (masks & came).any(0), (~masks & came).any(0)
    if bool((kept & cut).any()):
        return dict(replies)
    whole = torch.where(kept | cut, kept, expected)
    return {seat: r if r.came is None else replace(r, mask=whole) for seat, r in replies.items()}


def blocks_record(deliveries: Mapping[int, Delivery], nodes: Mapping[int, int]) -> dict[str, Any]:
    """Deliveries by client for a round's record: packets, and coordinates as ranges in wire order.

    Ranges are left out where there are so many that the line would be too long.
    """
    out: dict[str, Any] = {}
    brief = sum(len(found.ranges) for found in deliveries.values()) > _MOST_RANGES
    for seat, node in sorted(nodes.items()):
        found = deliveries.get(node)
        if found is not None:
            out[str(seat)] = {
                "packets": found.packets,
                "of": found.total,
                "refused": found.refused,
                "share": float(found.arrived.mean()),
                **({} if brief else {"ranges": [list(pair) for pair in found.ranges]}),
            }
    return out
