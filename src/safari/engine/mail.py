"""What a round's messages come to in bytes, and what a lossy format makes of them."""

from __future__ import annotations

from functools import cached_property
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from safari.config import Wire
from safari.engine.world import World
from safari.models import Layout
from safari.pruning import PRUNERS
from safari.seeds import generator
from safari.wire import Lossy, Shared, WireLayout, decode, encode

_EXACT = ("auto", "absolute", "difference")


def wire_layout(layout: Layout) -> WireLayout:
    """A model's layout as the wire format knows it: names, sizes, what may be cut."""
    entries = layout.entries
    return WireLayout(
        [e.name for e in entries], [e.size for e in entries], [e.kind == "weight" for e in entries]
    )


class Mail:
    """One round's messages. Both ends hold the broadcast model; an upload says what the server lacks.

    Exact modes change nothing, so that they are encoded only in the rounds in which bytes are counted;
    lossy ones are encoded in every round, and the server gets what it would have decoded.
    """

    def __init__(self, world: World, x: Tensor, t: int):
        self._world, self._x, self._t = world, x, t
        every = world.config.wire.every
        self.counts = every > 0 and (t % every == 0 or t + 1 == world.config.rounds)
        self.lossy = world.config.wire.values not in _EXACT
        self._up: list[int] = []

    def up(self, client: int, model: Tensor, mask: Tensor) -> Tensor:
        """A client's model as it arrives at the server."""
        if not (self.counts or self.lossy) or not bool(torch.isfinite(model).all()):
            return model
        wire = self._world.config.wire
        frame = encode(
            model.cpu().numpy(),
            mask.cpu().numpy(),
            self.shared,
            values=wire.values,
            lossy=self._choices(wire, client),
        )
        self._up.append(len(frame))
        if not self.lossy:
            return model
        return torch.from_numpy(decode(frame, self.shared).vector).to(model.device)

    def sizes(self) -> dict[str, float | None]:
        """Bytes of an upload that arrived (mean over clients) and of the broadcast; None: not counted."""
        if not self.counts:
            return {"up": None, "down": None}
        model = self._x.cpu().numpy()
        kept = (model != 0) | ~self._world.layout.prunable.numpy()
        down = len(encode(model, kept, self.shared.layout, values="absolute"))
        return {"up": fmean(self._up) if self._up else None, "down": float(down)}

    @cached_property
    def shared(self) -> Shared:
        """What both ends hold before an upload: the layout, the broadcast model, the mask to expect."""
        return Shared(
            wire_layout(self._world.layout), reference=self._x.cpu().numpy(), predicted_mask=self._predicted()
        )

    def _predicted(self) -> np.ndarray:
        """The mask that the server expects: the client's own where it needs no data, else by magnitude."""
        other = PRUNERS["mag"] if self._world.pruner.needs_data else None
        return self._world.mask(self._x, 0, self._t, other).cpu().numpy()

    def _choices(self, wire: Wire, client: int) -> Lossy:
        return Lossy(wire.bits, wire.step, generator(self._world.seed, "wire", client, self._t))
