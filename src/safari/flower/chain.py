"""Lossy downloads: a chain of delta frames from one round's public model to the next.

A client that holds the public model of an earlier round gets the frames from there to the current round; any
other client gets the full model. Either way all clients hold the same numbers. The rounding error of the
parameters is fed back into the next frame, so that nothing is lost for good.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

from safari.config import Config
from safari.errors import SafariError
from safari.models import Layout
from safari.rounds.beside import wire_layout
from safari.seeds import generator
from safari.wire import (
    Lossy,
    Shared,
    SharedKnowledgeError,
    WireLayout,
    decode,
    encode,
    reference_digest,
    with_residual,
)

# Beyond this many frames the full model is hardly longer, and few clients are that far behind.
LONGEST = 8
MEMORY = "safari.model"


@dataclass(frozen=True)
class Chain:
    """The public model of a round, the residual of its parameters (what rounding has left out so far), and the
    frames that led to it, the last of them from the round before."""

    round: int
    model: Tensor
    residual: Tensor
    frames: tuple[bytes, ...] = ()

    @classmethod
    def start(cls, model: Tensor, round: int, parameters: int) -> Chain:
        """A chain that begins with an exact model, of which the first `parameters` numbers are parameters."""
        return cls(round, model, torch.zeros_like(model[:parameters]))

    def advance(self, x: Tensor, wire: WireLayout, prunable: Tensor, values: str, lossy: Lossy) -> Chain:
        """The chain after one more round: a public model close to `x`, and the frame that leads to it."""
        kept = (x != 0) | ~prunable
        target = torch.from_numpy(with_residual(x.numpy(), kept.numpy(), self.residual.numpy()))
        shared = _shared(wire, self.model.numpy())
        frame = encode(target.numpy(), kept.numpy(), shared, values=values, lossy=lossy)
        model = torch.from_numpy(decode(frame, shared).vector)
        residual = torch.where(kept, target - model, 0.0)[: len(self.residual)]
        return Chain(self.round + 1, model, residual, (*self.frames, frame)[-LONGEST:])

    def since(self, held: int | None) -> tuple[bytes, ...] | None:
        """The frames from the public model of round `held` to the current one (none, if it is the current
        one); None if the chain does not reach back that far."""
        steps = None if held is None else self.round - held
        if steps is None or not 0 <= steps <= len(self.frames):
            return None
        return self.frames[len(self.frames) - steps :]


@dataclass(frozen=True)
class Downloads:
    """Lossy downloads of a run: the value mode, the chain, and which round's model each client is known to hold."""

    values: str
    chain: Chain | None = None
    held: Mapping[str, int] = field(default_factory=dict)

    def publish(self, model: Tensor, round: int, layout: Layout, config: Config) -> tuple[Tensor, Downloads]:
        """The public model of a round: close to this one, or itself where it is public already."""
        known = self.chain
        if known is not None and known.round == round and torch.equal(known.model, model):
            return model, self
        if known is None or known.round + 1 != round:
            return model, Downloads(self.values, Chain.start(model, round, layout.parameters))
        lossy = Lossy.of(config.wire, generator(config.seed, "download", round))
        chain = known.advance(model, wire_layout(layout), layout.prunable, self.values, lossy)
        return chain.model, replace(self, chain=chain)

    def frames_for(self, name: str | None) -> tuple[bytes, ...] | None:
        """The frames that a client needs; None: the full model."""
        return None if self.chain is None or name is None else self.chain.since(self.held.get(name))

    def noted(self, round: int, arrived: Iterable[str], failed: Iterable[str]) -> Downloads:
        """After a round: clients that arrived hold its model, those that failed may hold none."""
        failures = set(failed)
        held = {name: t for name, t in self.held.items() if name not in failures}
        return replace(self, held={**held, **dict.fromkeys(arrived, round)})


def follow(frames: Sequence[bytes], wire: WireLayout, held: np.ndarray | None, target: bytes) -> np.ndarray:
    """The client's side: the public model after these frames, whose digest is `target`.

    A client whose last reply was lost, or late, is further than the server knows. Frames that lead to where
    it is already are left out; without any that it lacks, it holds the model.
    """
    found = np.zeros(0, np.float32) if held is None else held
    for frame in () if held is None else frames:
        # A frame states what it builds on.
        with suppress(SharedKnowledgeError):
            found = decode(frame, _shared(wire, found)).vector
    if held is None or reference_digest(found) != target:
        raise SafariError(
            "the message builds on a model that this client does not hold; it will get it in full"
        )
    return found


def remember(state: RecordDict, model: np.ndarray) -> None:
    """Store the public model in the client's state, for the next round."""
    state[MEMORY] = ArrayRecord({"model": Array(model)})


def remembered(state: Mapping[str, object], size: int) -> np.ndarray | None:
    """The stored public model; None if there is none of this length."""
    record = state.get(MEMORY)
    if not isinstance(record, ArrayRecord) or "model" not in record:
        return None
    model = record["model"].numpy()
    return model if model.shape == (size,) and model.dtype == np.float32 else None


def _shared(wire: WireLayout, model: np.ndarray) -> Shared:
    """Shared state of both ends: the previous model, and its support as the predicted mask."""
    expected = (model != 0) | np.repeat(~np.array(wire.prunable, np.bool_), wire.sizes)
    return Shared(wire, reference=model, predicted_mask=expected)
