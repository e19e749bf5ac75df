"""A round's model as it goes out to the clients, and what both ends then share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor, nn

from safari.config import Config
from safari.flower.arrays import MASK, VECTOR, chain_record, frame_record, with_beside
from safari.flower.methods import Plan
from safari.flower.protocol import Instructions
from safari.flower.residual import NEVER
from safari.models import Layout
from safari.pruning import PRUNERS, Budget, Pruner, compute_mask
from safari.rounds.beside import encode_vector, wire_layout
from safari.rounds.masks import refuse_dead_layers, sparsity_of
from safari.seeds import torch_generator
from safari.wire import Shared, WireLayout, encode, encode_mask, reference_digest

ARRAYS, CONFIG = "arrays", "config"


@dataclass(frozen=True)
class Broadcast:
    """Broadcast of a round, and the state that both ends share after it.

    `beside` travels in one record with the model, whichever form that has; `size` counts both.
    """

    arrays: ArrayRecord
    instructions: Instructions
    shared: Shared
    layout: Layout
    size: float
    plan: Plan
    beside: Mapping[str, bytes]

    def content(
        self,
        config: Mapping[str, Any],
        server_round: int,
        frames: tuple[bytes, ...] | None = None,
        heard: int = NEVER,
        came: bytes = b"",
        own: Mapping[str, bytes] | None = None,
    ) -> RecordDict:
        """A message's content: the model (or frames that lead to it), the user's own config with the round
        in it, and our instructions for clients that were last heard in round `heard`, and of whom these packets
        `came` then. `own`: what travels beside the model for one client alone."""
        entries = replace(self.instructions, heard=heard, came=came).entries()
        table = ConfigRecord({**config, "server-round": server_round, **entries})
        arrays = self.arrays if frames is None else chain_record(frames)
        return RecordDict({ARRAYS: with_beside(arrays, {**self.beside, **(own or {})}), CONFIG: table})

    def bytes_with(self, frames: tuple[bytes, ...] | None, own: Mapping[str, bytes]) -> float:
        """Payload of a message in bytes, without Flower's own, with the model in full or as frames."""
        more = sum(map(len, own.values()))
        if frames is None:
            return self.size + more
        return sum(map(len, frames)) + sum(map(len, self.beside.values())) + more

    def own_of(self, seat: int | None) -> dict[str, bytes]:
        """Extra payloads for the client in one seat alone; None: for a client without a seat."""
        rows = (
            self.plan.fresh if seat is None else {name: rows[seat] for name, rows in self.plan.each.items()}
        )
        return _vectors(rows, self.layout)


def _vectors(vectors: Mapping[str, Tensor], layout: Layout) -> dict[str, bytes]:
    """An algorithm's vectors as they travel."""
    rows = {name: vector.cpu() for name, vector in vectors.items()}
    return {f"{VECTOR}{name}": encode_vector(row, row != 0, layout) for name, row in rows.items()}


def predictor(pruner: str) -> Pruner:
    """Pruner that predicts a mask equally on any hardware: random ranks for `rand`, otherwise magnitudes."""
    return PRUNERS["rand" if pruner == "rand" else "mag"]


def predict_mask(
    module: nn.Module, layout: Layout, x: Tensor, round: int, budget: Budget, pruner: str, seed: int
) -> Tensor:
    """The mask that both ends can work out on any hardware: that of `rand`, or the largest weights of what is not 0.

    From the second round on, the support is within the budget for every pruner without data, and is the
    mask itself, unless a schedule cuts further. The module is scratch.
    """
    support = None if round == 0 else x != 0
    draws = torch_generator(seed, "pruner")
    return compute_mask(module, layout, x, predictor(pruner), budget, None, draws, support)


def support_of(x: Tensor, layout: Layout) -> Tensor:
    """Support of a model as a mask: the numbers that are not 0, and all that is never pruned."""
    return (x != 0) | ~layout.prunable


def mask_known_by(x: Tensor, layout: Layout, wire: WireLayout) -> Shared:
    """Shared state for a mask that accompanies a model: the model's support predicts most of it."""
    return Shared(wire, None, support_of(x, layout).numpy())


def broadcast(
    module: nn.Module,
    layout: Layout,
    x: Tensor,
    config: Config,
    plan: Plan,
    *,
    dense: ArrayRecord | None = None,
    held: Tensor | None = None,
    remember: bool = False,
    upload: str = "frame",
) -> Broadcast:
    """The model of a round as one exact frame or, where they are given as `dense`, as plain arrays.

    `plan`: the round's masks and what travels beside the model. `held`: the mask of the round before, where all of
    those who are asked hold it: the new one then travels as what changed. `remember`: the next round may build on
    this model, so that it is sent whole and an announced mask beside it. `upload`: how clients are to answer. The
    module is scratch.
    """
    vector, base = x.cpu(), plan.base
    wire = wire_layout(layout)
    received = plan.received(vector)
    sent = vector if remember else received
    expected = base
    if expected is None:
        pruner, seed = config.pruning.pruner, config.seed
        expected = predict_mask(module, layout, vector, plan.number, plan.budget, pruner, seed)
    if plan.number == 0 and (base is not None or config.pruning.pruner in ("rand", "mag")):
        refuse_dead_layers(expected, layout, config.pruning, "the first mask")
    shared = Shared(wire, reference=received.numpy(), predicted_mask=expected.numpy())
    beside = _vectors(plan.down, layout)
    if base is not None and remember:
        beside[MASK] = encode_mask(base.numpy(), mask_known_by(vector, layout, wire))
    instructions = Instructions(
        round=plan.number,
        pruner=config.pruning.pruner,
        sparsity=sparsity_of(config.pruning, plan.number),
        scope=config.pruning.scope,
        dense=json.dumps(config.pruning.dense),
        least=config.pruning.least,
        masks=plan.kind,
        moves=plan.moves,
        votes=plan.votes,
        client=config.client.name,
        options=json.dumps(dict(config.client.options)),
        lr=plan.lr,
        seed=config.seed,
        values=config.wire.values,
        bits=config.wire.bits,
        step=config.wire.step,
        ratio=config.wire.ratio,
        fraction=config.wire.fraction,
        threshold=config.wire.threshold,
        layout=wire.digest,
        model=reference_digest(sent.numpy()),
        predicted=shared.mask_digest,
        remember=remember,
        feedback=config.wire.feeds_back,
        heard=NEVER,
        came=b"",
        upload=upload,
    )
    more = sum(map(len, beside.values()))
    if dense is not None:
        size = sum(len(a.data) for a in dense.values())
        return Broadcast(dense, instructions, shared, layout, size + more, plan, beside)
    inside = base is not None and not remember
    kept = base if inside and base is not None else support_of(sent, layout)
    mode = "best" if inside else "auto"
    known = wire if held is None or not inside else Shared(wire, None, held.numpy())
    frame = encode(sent.numpy(), kept.numpy(), known, values="absolute", mask_mode=mode)
    return Broadcast(frame_record(frame), instructions, shared, layout, len(frame) + more, plan, beside)
