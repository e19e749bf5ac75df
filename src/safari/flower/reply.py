"""What one client's reply holds, or why it cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from safari.errors import SafariError
from safari.flower.arrays import dense_vector, frame_of
from safari.flower.broadcast import ARRAYS, Broadcast
from safari.flower.protocol import PARTITION_ID, SAFARI, ClientInfo, node_name
from safari.wire import decode

_LOSS_NAMES = ("train_loss", "train-loss", "loss")


@dataclass(frozen=True)
class Reply:
    """A reply that can be used: whose it is, its model and mask, its numbers, and how the model travelled."""

    name: str
    vector: Tensor
    mask: Tensor
    metrics: Mapping[str, float]
    size: int
    mode: str

    @property
    def loss(self) -> float | None:
        """The training loss, under one of its usual names."""
        return next((self.metrics[name] for name in _LOSS_NAMES if name in self.metrics), None)


def read_reply(message: Message, node: int, sent: Broadcast, by_name: bool) -> Reply:
    """What a reply holds; SafariError says why it cannot be used.

    `by_name`: believe the name that the client gives; otherwise a client is its node.
    """
    if not message.has_content():
        raise SafariError("the reply is empty")
    content = message.content
    arrays = _only(content.array_records, ARRAYS)
    if arrays is None or not len(arrays):
        raise SafariError("the reply holds no model")
    metrics = numbers_of(content)
    frame = frame_of(arrays)
    name = _name(content, metrics, node, signed=frame is not None) if by_name else node_name(node)
    if frame is not None:
        found = decode(frame, sent.shared)
        mode = f"{found.info.modes.values}, mask {found.info.modes.mask}"
        arrays_found = torch.from_numpy(found.vector), torch.from_numpy(found.mask)
        return Reply(name, *arrays_found, metrics, len(frame), mode)
    vector = dense_vector(arrays, sent.layout)
    mask = (vector != 0) | ~sent.layout.prunable
    return Reply(name, vector, mask, metrics, sum(len(a.data) for a in arrays.values()), "dense")


def numbers_of(content: RecordDict) -> dict[str, float]:
    """The plain numbers of a message's metrics."""
    record = _only(content.metric_records, "metrics") or {}
    return {name: value for name, value in record.items() if isinstance(value, int | float)}


def _name(content: RecordDict, metrics: Mapping[str, float], node: int, signed: bool) -> str:
    record = content.config_records.get(SAFARI)
    if signed or record is not None:
        return ClientInfo.read(record or {}).client
    if isinstance(metrics.get(PARTITION_ID), int):
        return str(metrics[PARTITION_ID])
    return node_name(node)


def _only(records: Mapping[str, Any], name: str) -> Any:
    """The record of this name, or the only one there is."""
    if name in records:
        return records[name]
    return next(iter(records.values())) if len(records) == 1 else None
