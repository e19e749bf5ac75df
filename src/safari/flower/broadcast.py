"""A round's model as it goes out to the clients, and what both ends then share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor, nn

from safari.config import Config
from safari.flower.arrays import chain_record, frame_record
from safari.flower.protocol import Instructions
from safari.flower.residual import NEVER
from safari.models import Layout
from safari.pruning import PRUNERS, compute_mask
from safari.rounds.beside import wire_layout
from safari.seeds import torch_generator
from safari.wire import Shared, encode

ARRAYS, CONFIG = "arrays", "config"


@dataclass(frozen=True)
class Broadcast:
    """What goes out in a round, and what both ends then share."""

    arrays: ArrayRecord
    instructions: Instructions
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
        in it, and our instructions for clients that were last heard in round `heard`."""
        entries = replace(self.instructions, heard=heard).entries()
        table = ConfigRecord({**config, "server-round": server_round, **entries})
        return RecordDict({ARRAYS: self.arrays if frames is None else chain_record(frames), CONFIG: table})


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
    dense: ArrayRecord | None = None,
    remember: bool = False,
    upload: str = "frame",
) -> Broadcast:
    """The model of a round as one exact frame or, where they are given as `dense`, as plain arrays.

    `remember`: the next round may build on this model. `upload`: how clients are to answer. The module is
    scratch.
    """
    vector = x.cpu()
    predicted = predict_mask(module, layout, vector, round, config.pruning.sparsity)
    wire = wire_layout(layout)
    shared = Shared(wire, reference=vector.numpy(), predicted_mask=predicted.numpy())
    instructions = Instructions(
        round=round,
        pruner=config.pruning.pruner,
        sparsity=config.pruning.sparsity,
        seed=config.seed,
        values=config.wire.values,
        bits=config.wire.bits,
        step=config.wire.step,
        ratio=config.wire.ratio,
        fraction=config.wire.fraction,
        threshold=config.wire.threshold,
        layout=wire.digest,
        model=shared.reference_digest,
        predicted=shared.mask_digest,
        remember=remember,
        feedback=config.wire.feeds_back,
        heard=NEVER,
        upload=upload,
    )
    if dense is not None:
        return Broadcast(dense, instructions, shared, layout, sum(len(a.data) for a in dense.values()))
    kept = (vector != 0) | ~layout.prunable
    frame = encode(vector.numpy(), kept.numpy(), wire, values="absolute")
    return Broadcast(frame_record(frame), instructions, shared, layout, len(frame))
