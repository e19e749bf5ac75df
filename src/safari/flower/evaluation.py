"""Tests of the new model on the clients: who is asked, who answered, and with what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Message

from safari.flower.reply import Metrics, read_metrics
from safari.flower.text import last_line


@dataclass(frozen=True)
class Evaluation:
    """A round's evaluation: the seats of those who are asked, by node, and what was sent to them.

    `size`: bytes of a message's model, on average.
    """

    seats: Mapping[int, int]
    messages: tuple[Message, ...] = ()
    size: float = 0


@dataclass(frozen=True)
class Evaluated:
    """Outcome of an evaluation. `metrics`: of the nodes that answered. `nodes`: these nodes, which now hold
    the model. `record`: the entry of the round's record."""

    metrics: list[Metrics]
    nodes: list[int]
    record: dict[str, Any]


def collect_evaluation(asked: Evaluation, replies: Iterable[Message], timeout: float) -> Evaluated:
    """Match the replies to those who were asked."""
    # Messages get their ids when they are sent.
    nodes = {m.metadata.message_id: m.metadata.dst_node_id for m in asked.messages}
    metrics: dict[int, Metrics] = {}
    reasons = dict.fromkeys(nodes.values(), f"no reply within {timeout:g} s")
    for reply in replies:
        node = nodes.get(reply.metadata.reply_to_message_id)
        if node is None or node in metrics:
            continue
        if reply.has_error():
            reasons[node] = f"error {reply.error.code}: {last_line(reply.error.reason or '')}"
        else:
            metrics[node] = read_metrics(reply.content)
            del reasons[node]
    record = {
        "asked": sorted(asked.seats[node] for node in nodes.values()),
        "answered": sorted(asked.seats[node] for node in metrics),
        "reasons": {str(asked.seats[node]): reason for node, reason in sorted(reasons.items())},
        "down": float(asked.size),
    }
    return Evaluated([metrics[node] for node in sorted(metrics)], sorted(metrics), record)
