"""What is measured in a round, and the record made of it: the same for every engine and for Flower."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from safari.aggregation import Outcome
from safari.models import Layout
from safari.runs.metrics import CLASSIFICATION, RunMetrics
from safari.runs.record import RoundRecord


class Stopwatch:
    """Seconds by part; waits for the device, so that each part is charged its own work."""

    def __init__(self, device: torch.device):
        self.seconds: dict[str, float] = {}
        self._device = device
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Charge the time since the last lap to `part`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.charge(part, time.perf_counter() - self._last)

    def charge(self, part: str, seconds: float) -> None:
        """Charge seconds that were measured elsewhere; the next lap begins now."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self._last = time.perf_counter()


class MaskCount:
    """How dense a round's masks are, and how far clients agree, without keeping the masks."""

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
        """What each client kept, and what all and any of them did."""
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


@dataclass(frozen=True)
class Facts:
    """What an engine knows of a round when it is over; `round` counts from 0.

    `losses` and `masks` are those of the clients that arrived: what a server could know. `sizes` are the
    bytes of one message up and down, `modes` how many uploads went in which; None where not counted.
    `before` and `after` are the global models; `kept` are the masks of the round before and of this one,
    where the server chooses them (None: what is not 0 in the models is what is left of them). `metrics` says
    what a test finds: `scores` are those of the new model and `average` those of the running average; None
    where there was no test. `by_client` has the score on what each client holds out, where clients do.
    """

    round: int
    trained: Sequence[int]
    outcome: Outcome
    losses: Sequence[float]
    masks: MaskCount
    sizes: Mapping[str, float | None]
    modes: Mapping[str, int] | None
    before: Tensor
    after: Tensor
    metrics: RunMetrics = CLASSIFICATION
    scores: Mapping[str, float] | None = None
    average: Mapping[str, float] | None = None
    diagnosis: Mapping[str, float | None] | None = None
    kept: tuple[Tensor, Tensor] | None = None
    by_client: Sequence[float] | None = None


def record_of(layout: Layout, facts: Facts) -> RoundRecord:
    """The record of a round, in which it counts from 1."""
    weights = [e for e in layout.entries if e.kind == "weight"]
    outcome, masks = facts.outcome, facts.masks
    before, now = facts.kept or (facts.before != 0, facts.after != 0)
    changed = now ^ before
    counts, changes = layout.weights_in(now, changed)
    support = {e.name: round(n / max(1, e.size), 6) for e, n in zip(weights, counts, strict=True)}
    churn = {e.name: round(n / e.size, 6) for e, n in zip(weights, changes, strict=True) if n}
    return RoundRecord(
        round=facts.round + 1,
        metrics=_scores(facts.metrics, facts.scores or {}),
        average=None if facts.average is None else _scores(facts.metrics, facts.average),
        train_loss=_finite(fmean(facts.losses)) if facts.losses else None,
        trained=tuple(facts.trained),
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
        bytes=facts.sizes,
        modes=facts.modes,
        diagnosis=facts.diagnosis,
        clients=None if facts.by_client is None else client_spread(facts.by_client, facts.metrics),
    )


def client_spread(scores: Sequence[float], metrics: RunMetrics = CLASSIFICATION) -> dict[str, Any]:
    """The score on each client's own samples: mean, worst, standard deviation over clients, and each.

    >>> client_spread([0.5, 1.0])
    {'mean': 0.75, 'worst': 0.5, 'spread': 0.25, 'scores': [0.5, 1.0]}
    """
    known = [score for score in scores if math.isfinite(score)]
    worst = min if metrics.main.higher else max
    return {
        "mean": fmean(known) if known else None,
        "worst": worst(known) if len(known) == len(scores) else None,
        "spread": pstdev(known) if known else None,
        "scores": [_finite(score) for score in scores],
    }


def _scores(metrics: RunMetrics, found: Mapping[str, float]) -> dict[str, float | None]:
    """What was found, by the names of the metrics; None for what does not exist here."""
    return {name: _finite(found.get(name, math.nan)) for name in metrics.names}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
