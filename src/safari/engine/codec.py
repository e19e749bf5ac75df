"""Encoding of a round's messages: their size in bytes, and the models after a lossy format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from safari.engine.lossy import as_decoded, encodable
from safari.engine.world import World
from safari.federation import Broadcast, State
from safari.modes import ValueMode
from safari.pruning import PRUNERS, Masks
from safari.rounds.beside import encode_vector, votes_to_bytes, wire_layout
from safari.seeds import generator
from safari.wire import Lossy, Shared, WireLayout, encode, encode_frame


class RoundCodec:
    """One round's messages. Both ends hold the broadcast model; an upload says what the server lacks.

    Messages are encoded in the rounds in which bytes are counted. Lossy modes are felt in every round: the
    server gets what it would have decoded. `residual` (`float32[clients, parameters]`) is what earlier
    uploads left out, where clients keep that for later; after the round it is the next round's. Buffers
    have none: they are statistics that renew themselves. `held` is the mask that was announced in the round
    before: a new one travels as what changed, where everybody is sure to hold that. `levels` is how many QSGD
    has in this round, where the server says so.
    """

    def __init__(
        self,
        world: World,
        x: Tensor,
        t: int,
        masks: Masks | None = None,
        residual: Tensor | None = None,
        held: Tensor | None = None,
        levels: int | None = None,
    ):
        self._world, self._x, self._t, self._held = world, x, t, held
        self.levels = levels
        self._masks = world.first_masks(x, t) if masks is None else masks
        every = world.config.wire.every
        self.counts = every > 0 and (t % every == 0 or t + 1 == world.config.rounds)
        self.lossy = not ValueMode(world.config.wire.values).exact
        self.residual = residual if residual is None else residual.clone()
        self._up: list[float] = []
        self._beside = 0
        self._beside_down = 0.0
        self._modes: Counter[str] = Counter()

    @classmethod
    def of(cls, world: World, state: State, sent: Broadcast) -> RoundCodec:
        """The codec of a round that has begun."""
        residual = state["wire"].get("residual")
        codec = cls(world, sent.model, sent.round, sent.masks, residual, state.mask, sent.levels)
        codec.beside_down(sent.along)
        return codec

    def up(self, clients: Sequence[int], models: Tensor, masks: Tensor) -> Tensor:
        """Clients' models (a row each; one row of masks may stand for all) as they arrive at the server.

        Only for uploads that do arrive: nobody sees the others, and their residual stays. The
        client learns which they were from its next broadcast, before it looks at its residual again.
        """
        if not (self.counts or self.lossy) or not clients:
            return models
        wire = self._world.config.wire
        kept = masks.expand(len(models), -1)
        fit = encodable(models, self._x)
        sent, rows = models, torch.tensor(list(clients), device=models.device)
        if self.residual is not None:
            trained = self.residual.shape[1]
            more = torch.where(kept[:, :trained], models[:, :trained] + self.residual[rows], 0.0)
            sent = torch.cat([more, models[:, trained:]], dim=1)
            fit &= encodable(sent, self._x)
            sent = torch.where(fit[:, None], sent, models)
        got = sent
        if self.lossy:
            choices = [self.choices(client) for client in clients]
            decoded = as_decoded(
                sent, masks, self._x, self.layout, wire.values, choices, self._expected(masks)
            )
            got = torch.where(fit[:, None], decoded, sent)
        if self.residual is not None:
            told = kept[:, :trained] & fit[:, None]
            self.residual[rows] = torch.where(told, (sent - got)[:, :trained], self.residual[rows])
        if self.counts:
            self._count(clients, sent, kept, fit)
        return got

    def _count(self, clients: Sequence[int], sent: Tensor, kept: Tensor, fit: Tensor) -> None:
        wire = self._world.config.wire
        for client, vector, mask, fits in zip(clients, sent, kept, fit.tolist(), strict=True):
            if fits:
                lossy = self.choices(client)
                arrays = vector.cpu().numpy(), mask.cpu().numpy()
                mask_mode = "auto" if self._masks.own is None else "best"
                frame = encode_frame(
                    *arrays, self.shared, values=wire.values, mask_mode=mask_mode, lossy=lossy
                )
                self._up.append(len(frame.data))
                self._modes[f"{frame.modes.values}, mask {frame.modes.mask}"] += 1

    def beside(self, vectors: Mapping[str, Tensor], masks: Tensor, votes: Tensor | None) -> None:
        """Count what travels beside uploads that arrive: an algorithm's vectors and votes, a row a client."""
        if not self.counts:
            return
        layout = self._world.layout
        for rows in vectors.values():
            kept = masks[:, : layout.parameters].expand(len(rows), -1)
            self._beside += sum(
                len(encode_vector(row, mask, layout)) for row, mask in zip(rows, kept, strict=True)
            )
        for row in () if votes is None else votes:
            self._beside += len(votes_to_bytes(row, layout))

    def beside_down(self, vectors: Mapping[str, Tensor]) -> None:
        """Count what travels down beside the model; of what each client gets for itself, the mean over clients."""
        if self.counts:
            for vector in vectors.values():
                rows = vector if vector.ndim > 1 else vector[None]
                sizes = [len(encode_vector(row, row != 0, self._world.layout)) for row in rows]
                self._beside_down += sum(sizes) / len(sizes)

    def sizes(self) -> dict[str, float | None]:
        """Bytes of an upload that arrived (mean over clients) and of the broadcast; None: not counted.

        With everything that travels beside the model.
        """
        if not self.counts:
            return {"up": None, "down": None}
        model, known = self._x, Shared(self.layout)
        if self._masks.announced and self._masks.base is not None:
            kept = self._masks.base
            model = model.masked_fill(~kept, 0.0)
            if self._held is not None and self._all_hear_every_round:
                known = Shared(self.layout, None, self._held.cpu().numpy())
        else:
            # Clients work the mask out from the model; zeros need not be sent.
            kept = (model != 0) | ~self._world.layout.prunable.to(model.device)
        frame = encode(model.cpu().numpy(), kept.cpu().numpy(), known, values="absolute", mask_mode="best")
        up = (sum(self._up) + self._beside) / len(self._up) if self._up else None
        return {"up": up, "down": float(len(frame) + self._beside_down)}

    def modes(self) -> dict[str, int] | None:
        """Number of uploads encoded in each mode; None: not counted."""
        return dict(sorted(self._modes.items())) if self.counts else None

    @property
    def _all_hear_every_round(self) -> bool:
        config = self._world.config
        everybody = config.sampling.name == "uniform" and config.cohort in (0, config.clients)
        return config.downlink.name == "perfect" and everybody

    @cached_property
    def layout(self) -> WireLayout:
        """The model's layout on the wire."""
        return wire_layout(self._world.layout)

    @cached_property
    def shared(self) -> Shared:
        """State that both ends share before an upload: the layout, the broadcast model, the expected mask."""
        return Shared(self.layout, self._x.cpu().numpy(), self._predicted.cpu().numpy())

    def _expected(self, masks: Tensor) -> Tensor:
        """The mask that the server expects, as a row: these clients' own where it is shared."""
        return masks[:1] if self._masks.shared is not None else self._predicted[None]

    @cached_property
    def _predicted(self) -> Tensor:
        """The mask that the server expects: the shared one, the one that clients start from, or by magnitude."""
        masks = self._masks
        if masks.shared is not None:
            return masks.shared
        if masks.own is not None and masks.support is not None:
            return masks.support
        return self._world.score_mask(self._x, self._t, masks.support, pruner=PRUNERS["mag"])

    def choices(self, client: int) -> Lossy:
        """A client's options of lossy modes, with its own draws."""
        lossy = Lossy.of(self._world.config.wire, generator(self._world.seed, "wire", client, self._t))
        return lossy if self.levels is None else replace(lossy, levels=self.levels)

    def in_packets(self, sizes: Sequence[float]) -> None:
        """Count uploads as they travel in packets: the bytes that each client sent, whatever arrived."""
        if self.counts:
            self._up = list(sizes)
