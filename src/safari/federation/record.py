"""A round's record, as far as the server knows the round."""

from __future__ import annotations

import math
from statistics import fmean

import torch
from torch import Tensor

from safari.aggregation import Outcome
from safari.federation.forms import Uploads
from safari.models import Layout
from safari.runs.record import RoundRecord


class MaskCount:
    """Density of a round's masks and agreement between clients, counted without keeping the masks."""

    def __init__(self, layout: Layout):
        self._layout = layout
        # The numbers stay on the device until they are asked for, and then come at once.
        self._kept: list[Tensor] = []
        self._clients: list[int] = []
        self._any: Tensor | None = None
        self._all: Tensor | None = None
        self._numbers: tuple[list[int], int, int] | None = None

    def add(self, mask: Tensor, clients: int = 1) -> None:
        """Count one client's mask, or one that several share."""
        self._add(mask.unsqueeze(0), clients)

    def add_rows(self, masks: Tensor) -> None:
        """Count several clients' masks, one a row."""
        self._add(masks, 1)

    def _add(self, masks: Tensor, clients: int) -> None:
        weights = masks & self._layout.prunable_on(masks.device)
        self._kept.append(weights.sum(1))
        self._clients.append(clients)
        alone = len(weights) == 1
        either, both = (weights[0],) * 2 if alone else (weights.any(0), weights.all(0))
        self._any = either if self._any is None else self._any | either
        self._all = both if self._all is None else self._all & both
        self._numbers = None

    def _found(self) -> tuple[list[int], int, int]:
        """Numbers of weights kept: by each client, by all clients, and by any."""
        if self._numbers is None and self._all is not None and self._any is not None:
            # A single mask is what all and any of them keep.
            single = len(self._kept) == 1 and len(self._kept[0]) == 1
            looks = [] if single else [torch.stack([self._all.sum(), self._any.sum()])]
            numbers = torch.cat([*self._kept, *looks]).tolist()
            rows = numbers if single else numbers[:-2]
            times = (n for kept, n in zip(self._kept, self._clients, strict=True) for _ in range(len(kept)))
            each = [count for count, n in zip(rows, times, strict=True) for _ in range(n)]
            both, either = (rows[0], rows[0]) if single else numbers[-2:]
            self._numbers = each, both, either
        return self._numbers or ([], 0, 0)

    @property
    def density(self) -> float | None:
        """Mean fraction of the prunable weights that a client kept."""
        kept, _, _ = self._found()
        return fmean(kept) / self._layout.prunable_count if kept else None

    @property
    def agreement(self) -> float | None:
        """Weights kept by all clients over weights kept by any: 1 when all masks are the same."""
        if self._any is None:
            return None
        _, both, either = self._found()
        return both / max(1, either)


def record_of(
    layout: Layout, number: int, outcome: Outcome, got: Uploads, kept: tuple[Tensor, Tensor]
) -> RoundRecord:
    """The record of a round (counted from 0; in the record it counts from 1).

    Losses and masks are those of the clients whose uploads were used. `kept`: the masks of the round before and of this
    one where the server announces them, or else what is not 0 in the models.
    """
    weights = [e for e in layout.entries if e.kind == "weight"]
    before, now = kept
    changed = now ^ before
    counts, changes = layout.weights_in(now, changed)
    support = {e.name: round(n / max(1, e.size), 6) for e, n in zip(weights, counts, strict=True)}
    churn = {e.name: round(n / e.size, 6) for e, n in zip(weights, changes, strict=True) if n}
    masks, losses = _used(layout, outcome, got)
    return RoundRecord(
        round=number + 1,
        metrics={},
        train_loss=finite(fmean(losses)) if losses else None,
        trained=tuple(got.trained),
        arrived=outcome.arrived,
        missing=outcome.missing,
        refused=outcome.refused,
        stand_ins=outcome.stand_ins,
        lost=outcome.lost,
        parts=outcome.parts or None,
        density=masks.density,
        agreement=masks.agreement,
        support=sum(counts) / layout.prunable_count,
        churn=sum(changes) / layout.prunable_count,
        layers=support,
        layer_churn=churn,
    )


def _used(layout: Layout, outcome: Outcome, got: Uploads) -> tuple[MaskCount, list[float]]:
    """The masks and losses of the uploads that were used."""
    count, rows = MaskCount(layout), got.rows(outcome.arrived)
    if outcome.arrived and len(got.masks) == 1:
        count.add(got.masks[0], len(outcome.arrived))
    elif outcome.arrived:
        count.add_rows(got.masks[rows])
    return count, [] if got.losses is None else got.losses[rows].tolist()


def finite(value: float) -> float | None:
    """The number, as a record has it: None where it is not finite."""
    return value if math.isfinite(value) else None
