"""The server's end of the wire: a round's model as it goes out, and what a reply to it is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor, nn

from safari.config import Config
from safari.engine.mail import wire_layout
from safari.errors import SafariError
from safari.flower.leftover import NEVER
from safari.flower.parcel import chain_record, dense_record, dense_vector, frame_of, frame_record
from safari.flower.terms import PARTITION_ID, SAFARI, Signature, Terms, node_name
from safari.models import Layout
from safari.pruning import PRUNERS, compute_mask
from safari.seeds import torch_generator
from safari.wire import Shared, decode, encode

ARRAYS, CONFIG = "arrays", "config"
_LOSS_NAMES = ("train_loss", "train-loss", "loss")


@dataclass(frozen=True)
class Broadcast:
    """What goes out in a round, and what both ends then share."""

    arrays: ArrayRecord
    terms: Terms
    shared: Shared
    layout: Layout
    size: int

    def content(
        self,
        config: Mapping[str, Any],
        server_round: int,
        frames: tuple[bytes, ...] | None = None,
        heard: int = NEVER,
    ) -> RecordDict:
        """A message's content: the model (or frames that lead to it), the user's own config with the round
        in it, and our terms for clients that were last heard in round `heard`."""
        table = ConfigRecord({**config, "server-round": server_round})
        arrays = self.arrays if frames is None else chain_record(frames)
        return RecordDict({ARRAYS: arrays, CONFIG: table, SAFARI: replace(self.terms, heard=heard).record()})


def predict_mask(module: nn.Module, layout: Layout, x: Tensor, round: int, sparsity: float) -> Tensor:
    """The mask that both ends can work out on any hardware: the largest weights of what is not 0.

    From the second round on, the support is within the budget for every pruner without data, and is the
    mask itself.
    """
    support = None if round == 0 else x != 0
    return compute_mask(
        module, layout, x, PRUNERS["mag"], sparsity, None, torch_generator(0, "pruner"), support
    )


def broadcast(
    module: nn.Module,
    layout: Layout,
    x: Tensor,
    round: int,
    config: Config,
    *,
    dense: Mapping[str, Array] | None = None,
    remember: bool = False,
) -> Broadcast:
    """The model of a round as one exact frame, or, beside the arrays in `dense`, as plain arrays.

    The module is scratch.
    """
    vector = x.cpu()
    predicted = predict_mask(module, layout, vector, round, config.pruning.sparsity)
    wire = wire_layout(layout)
    shared = Shared(wire, reference=vector.numpy(), predicted_mask=predicted.numpy())
    terms = Terms(
        round=round,
        pruner=config.pruning.pruner,
        sparsity=config.pruning.sparsity,
        seed=config.seed,
        values=config.wire.values,
        bits=config.wire.bits,
        step=config.wire.step,
        ratio=config.wire.ratio,
        layout=wire.digest,
        predicted=shared.mask_digest,
        remember=remember,
        feedback=config.wire.feeds_back,
        heard=NEVER,
    )
    if dense is not None:
        arrays = dense_record(layout, vector, dense)
        return Broadcast(arrays, terms, shared, layout, sum(len(a.data) for a in arrays.values()))
    kept = (vector != 0) | ~layout.prunable
    frame = encode(vector.numpy(), kept.numpy(), wire, values="absolute")
    return Broadcast(frame_record(frame), terms, shared, layout, len(frame))


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
        return Signature.read(record or {}).client
    if isinstance(metrics.get(PARTITION_ID), int):
        return str(metrics[PARTITION_ID])
    return node_name(node)


def _only(records: Mapping[str, Any], name: str) -> Any:
    """The record of this name, or the only one there is."""
    if name in records:
        return records[name]
    return next(iter(records.values())) if len(records) == 1 else None
