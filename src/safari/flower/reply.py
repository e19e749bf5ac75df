"""Read one client's reply, or say why it cannot be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import Array, Message, MetricRecord, RecordDict
from torch import Tensor

from safari.errors import SafariError
from safari.flower.arrays import VECTOR, VOTES, beside_of, dense_vector, frame_of
from safari.flower.broadcast import ARRAYS, Broadcast
from safari.flower.protocol import PARTITION_ID, SAFARI, ClientInfo, node_name
from safari.models import Layout
from safari.pruning import weight_entries
from safari.pruning.policies.regrow import GradientVotes, OwnMask
from safari.rounds.beside import decode_vector, votes_from_bytes
from safari.text import visible
from safari.wire import Identity, decode

if TYPE_CHECKING:
    from safari.net.blocks import Delivery

EXAMPLES = "num-examples"
# Bounds on what a client may say of itself. Nothing beyond them enters a weight, a mean or a record.
MOST_EXAMPLES = 10**9
# No training gives larger numbers, and sums of their products are still finite in float32.
LARGEST_WEIGHT = 1e12
LARGEST_METRIC = 1e12
MOST_METRICS = 64
LONGEST_METRIC_NAME = 100
_LOSS_NAMES = ("train_loss", "train-loss", "loss")


@dataclass(frozen=True)
class Metrics:
    """A client's numbers.

    `values`: its metrics, all finite. `examples`: how many samples it trained or tested on; None where it
    does not say or says something impossible, which `wrong_examples` then names. `ignored`: what else was
    left out, in words.
    """

    values: Mapping[str, float]
    examples: float | None
    wrong_examples: str | None
    ignored: tuple[str, ...]

    @property
    def loss(self) -> float | None:
        """The training loss, under one of its usual names."""
        return next((self.values[name] for name in _LOSS_NAMES if name in self.values), None)


@dataclass(frozen=True)
class Reply:
    """A reply that can be used: whose it is, its model and mask, its numbers, and how the model travelled."""

    name: str
    vector: Tensor
    mask: Tensor
    metrics: Metrics
    size: int
    mode: str
    # True where a number came, where the model did in part.
    came: Tensor | None = None
    # A bit for each of its packets then, 1 where it came.
    packets: bytes = b""
    # Extra payloads of the reply: the vectors of the client algorithm, and votes for weights to grow.
    up: Mapping[str, Tensor] = field(default_factory=dict)
    votes: Tensor | None = None


def read_reply(
    message: Message, node: int, sent: Broadcast, *, by_name: bool = True, weighted: bool = False
) -> Reply:
    """Read a reply; SafariError says why it cannot be used.

    `node`: the node that was asked. `sent`: what it was asked with. `by_name`: believe the name that the
    client gives; otherwise a client is its node. `weighted`: sample counts weigh the models, so that a reply
    with an impossible one cannot be used.
    """
    if not message.has_content():
        raise SafariError("the reply is empty")
    content = message.content
    arrays = _only(content.array_records, ARRAYS)
    if arrays is None or not len(arrays):
        raise SafariError("the reply holds no model")
    metrics = read_metrics(content)
    if weighted and metrics.wrong_examples is not None:
        raise SafariError(metrics.wrong_examples)
    frame = frame_of(arrays)
    info = _info(content, signed=frame is not None)
    name = _name(info, content, node) if by_name else node_name(node)
    if frame is None:
        vector, size, mode = dense_vector(arrays, sent.layout), _size(arrays), "dense"
        mask = _dense_mask(vector, info, sent.layout)
    else:
        if info is None:
            raise SafariError("the reply holds a frame and does not say whose")
        whose = Identity(info.client, sent.instructions.round, sent.shared.reference_digest)
        found = decode(frame, sent.shared, expect=whose)
        vector, mask, size = torch.from_numpy(found.vector), torch.from_numpy(found.mask), len(frame)
        mode = f"{found.info.modes.values}, mask {found.info.modes.mask}"
    _check_size(vector)
    if frame is not None or not bool(mask.all()):
        _check_mask(mask, sent)
    beside = beside_of(arrays)
    up, votes = read_up(beside, sent), read_votes(beside, sent)
    size += sum(map(len, beside.values())) if frame is not None else 0
    return Reply(name, vector, mask, metrics, size, mode, up=up, votes=votes)


def read_up(beside: Mapping[str, bytes], sent: Broadcast) -> dict[str, Tensor]:
    """Vectors of the client algorithm that accompany a model: those that were asked for, and no others."""
    found = {name.removeprefix(VECTOR): data for name, data in beside.items() if name != VOTES}
    wanted = sent.plan.up
    if set(found) != set(wanted):
        names = ", ".join(wanted) or "nothing"
        got = visible(", ".join(sorted(found)) or "nothing", 100)
        raise SafariError(f"the reply must hold {names} beside its model, got {got}")
    out: dict[str, Tensor] = {}
    for name, size in wanted.items():
        try:
            out[name] = decode_vector(found[name], size, sent.layout)
        except SafariError as error:
            raise SafariError(f"{name}, beside the model, cannot be read: {error}") from error
        _check_size(out[name], name)
    return out


def read_votes(beside: Mapping[str, bytes], sent: Broadcast) -> Tensor | None:
    """A client's votes for weights to grow; None where none were asked for."""
    asked = None if sent.plan.masks is None else sent.plan.masks.votes
    if not isinstance(asked, GradientVotes):
        if VOTES in beside:
            raise SafariError("the reply holds votes, and none were asked for")
        return None
    if VOTES not in beside:
        raise SafariError("the reply must hold votes beside its model, got none")
    try:
        votes = votes_from_bytes(beside[VOTES], sent.layout)
    except SafariError as error:
        raise SafariError(f"the votes cannot be read: {error}") from error
    _check_size(votes, "votes")
    places = votes != 0
    if bool((places & (asked.choose.mask | ~sent.layout.prunable)).any()):
        raise SafariError("votes must be for weights that are cut")
    for entry, most in zip(weight_entries(sent.layout), asked.choose.counts, strict=True):
        count = int(places[entry.offset : entry.end].sum())
        if count > most:
            raise SafariError(f"there must be at most {most} votes for {entry.name}, got {count}")
    return votes


class NothingCameError(SafariError):
    """A client has answered, and no packet of its model has arrived."""


def read_parts(
    message: Message,
    node: int,
    sent: Broadcast,
    delivery: Delivery | None,
    *,
    by_name: bool = True,
    weighted: bool = False,
) -> Reply:
    """Read a reply whose model was sent in packets; otherwise as `read_reply`."""
    if not message.has_content():
        raise SafariError("the reply is empty")
    metrics = read_metrics(message.content)
    if weighted and metrics.wrong_examples is not None:
        raise SafariError(metrics.wrong_examples)
    info = _info(message.content, signed=True)
    name = _name(info, message.content, node) if by_name else node_name(node)
    if delivery is None or not delivery.packets:
        refused = f"; {delivery.refused} could not be read" if delivery and delivery.refused else ""
        raise NothingCameError(f"no packet of the model arrived{refused}")
    vector, mask = torch.from_numpy(delivery.vector), torch.from_numpy(delivery.mask)
    _check_size(vector)
    _check_mask(mask, sent, None if delivery.whole else torch.from_numpy(delivery.arrived))
    came = None if delivery.whole else torch.from_numpy(delivery.arrived)
    packets = b"" if came is None else delivery.bits
    return Reply(name, vector, mask, metrics, delivery.size, delivery.modes, came, packets)


def read_metrics(content: RecordDict) -> Metrics:
    """The plain numbers of a message's metrics, within bounds; what is beyond them is named and left out."""
    raw = _raw_metrics(content)
    values: dict[str, float] = {}
    ignored: list[str] = []
    for name, value in list(raw.items())[:MOST_METRICS]:
        if name == EXAMPLES or not isinstance(value, int | float):
            continue
        if len(name) > LONGEST_METRIC_NAME:
            ignored.append(f"a metric's name has {len(name)} characters, at most {LONGEST_METRIC_NAME} count")
        elif not abs(value) <= LARGEST_METRIC:
            ignored.append(f"{visible(name)} must lie between ±{LARGEST_METRIC:g}, got {_number(value)}")
        else:
            values[name] = value
    if len(raw) > MOST_METRICS:
        ignored.append(f"there are {len(raw)} metrics, the first {MOST_METRICS} count")
    examples, wrong = _examples(raw.get(EXAMPLES))
    return Metrics(values, examples, wrong, tuple(ignored))


def mean_metrics(found: Sequence[Metrics]) -> MetricRecord | None:
    """Means of the metrics that at least half of the clients report, each over those that report it.

    Weighted by sample counts where all report them. Half, so that no single client can make a metric of the
    others disappear, or add names of its own.
    """
    if not found:
        return None
    counted = all(metrics.examples is not None for metrics in found)
    names = dict.fromkeys(name for metrics in found for name in metrics.values)
    means: dict[str, Any] = {}
    for name in names:
        reports = [
            (metrics.values[name], metrics.examples if counted and metrics.examples else 1.0)
            for metrics in found
            if name in metrics.values
        ]
        if 2 * len(reports) >= len(found):
            means[name] = sum(v * w for v, w in reports) / sum(w for _, w in reports)
    return MetricRecord(means)


def _examples(value: Any) -> tuple[float | None, str | None]:
    """A sample count, or what is wrong with it."""
    if value is None:
        return None, None
    if isinstance(value, int | float) and 1 <= value <= MOST_EXAMPLES:
        return float(value), None
    got = _number(value) if isinstance(value, int | float) else "a list"
    return None, f"{EXAMPLES} must lie between 1 and {MOST_EXAMPLES}, got {got}"


def _check_size(vector: Tensor, name: str = "the model") -> None:
    """Raise where a number is not finite, or larger than any that training leads to."""
    strange = int((~torch.isfinite(vector)).sum())
    if strange:
        what = "" if name == "the model" else f" of {name}"
        raise SafariError(f"{strange} numbers{what} are NaN or infinite")
    largest = float(vector.abs().max()) if len(vector) else 0.0
    if largest > LARGEST_WEIGHT:
        raise SafariError(f"{name}'s numbers must lie between ±{LARGEST_WEIGHT:g}, got ±{largest:g}")


def _check_mask(mask: Tensor, sent: Broadcast, came: Tensor | None = None) -> None:
    """Raise where a mask keeps more weights than the server asked for, or is not the one that was announced.

    `came`: which numbers arrived, where not all did; of the others the mask is not known.
    """
    prunable, expected = sent.layout.prunable, sent.shared.predicted_mask
    if expected is not None:
        kept, most = int((mask & prunable).sum()), int((torch.from_numpy(expected) & prunable).sum())
        if kept > most:
            raise SafariError(f"the mask must keep at most {most} weights, got {kept}")
    announced = sent.plan.shared
    if announced is not None:
        differ = mask != announced
        wrong = int((differ if came is None else differ & came).sum())
        if wrong:
            raise SafariError(f"the mask must be the one that was announced, {wrong} weights differ")
    own = None if sent.plan.masks is None else sent.plan.masks.own
    if isinstance(own, OwnMask):
        dropped = own.rest & ~mask
        wrong = int((dropped if came is None else dropped & came).sum())
        if wrong:
            raise SafariError(
                f"the mask must keep what stays of the one that was announced, it cuts {wrong} weights"
            )


def _dense_mask(vector: Tensor, info: ClientInfo | None, layout: Layout) -> Tensor:
    """The mask of a model in plain arrays: what the client says, where that is what it sends.

    A client without our side cuts nothing; a weight of its model that is 0 is so by chance. Nor does one whose
    mods or the strategy around this one have filled what it had cut, with noise or by clipping.
    """
    mask = torch.ones_like(vector, dtype=torch.bool)
    if info is None or not info.mask:
        return mask
    if len(info.mask) != -(-layout.prunable_count // 8):
        raise SafariError(
            f"{SAFARI}.mask must have a bit for each of {layout.prunable_count} weights, "
            f"got {len(info.mask)} bytes"
        )
    bits = np.unpackbits(np.frombuffer(info.mask, np.uint8), count=layout.prunable_count)
    mask[layout.prunable] = torch.from_numpy(bits.astype(np.bool_))
    return torch.ones_like(mask) if bool((vector[~mask] != 0).any()) else mask


def _info(content: RecordDict, signed: bool) -> ClientInfo | None:
    """Read the client's information. Without any, it is None or, if `signed`, an error: a frame needs it."""
    record = content.config_records.get(SAFARI)
    return ClientInfo.read(record or {}) if signed or record is not None else None


def _name(info: ClientInfo | None, content: RecordDict, node: int) -> str:
    if info is not None:
        return info.client
    partition = _raw_metrics(content).get(PARTITION_ID)
    # Bounded by what a partition can be: anything longer is no number that Flower gives.
    if isinstance(partition, int) and 0 <= partition < 2**31:
        return str(partition)
    return node_name(node)


def _size(arrays: Mapping[str, Array]) -> int:
    return sum(len(array.data) for array in arrays.values())


def _raw_metrics(content: RecordDict) -> Mapping[str, Any]:
    return _only(content.metric_records, "metrics") or {}


def _only(records: Mapping[str, Any], name: str) -> Any:
    """The record of this name, or the only one there is."""
    if name in records:
        return records[name]
    return next(iter(records.values())) if len(records) == 1 else None


def _number(value: float) -> str:
    """A number in few characters, however large."""
    try:
        return f"{float(value):g}"
    except OverflowError:
        return "a number beyond 1e308" if value > 0 else "a number beyond -1e308"
