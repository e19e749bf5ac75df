"""Measurements that only a simulator makes in a round: tests of the new model, a diagnosis, and seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from safari.engine.codec import RoundCodec
from safari.engine.diagnosis import Everyone, diagnose, due
from safari.engine.network import in_packets
from safari.engine.world import World
from safari.federation import Broadcast, Federation, State, Uploads, finish
from safari.federation.record import finite
from safari.runs.metrics import CLASSIFICATION, RunMetrics
from safari.runs.record import RoundRecord
from safari.training import Scores

# The next state, the record, and the seconds each part took.
Round = tuple[State, RoundRecord, dict[str, float]]


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


@dataclass(frozen=True)
class Testing:
    """An engine's ways to test a model.

    Args:
        model: Scores of a model; None in a round without a test.
        clients: Scores of a model on what each client holds out.
        everyone: Trains any clients of the round again, whatever the network does to them.
    """

    model: Callable[[Tensor], Scores | None]
    clients: Callable[[Tensor], list[float]]
    everyone: Everyone


def end_round(
    world: World,
    fed: Federation,
    before: State,
    state: State,
    sent: Broadcast,
    got: Uploads,
    codec: RoundCodec,
    tests: Testing,
    watch: Stopwatch,
) -> Round:
    """The end of a round in every engine: uploads arrive, the server makes the next model, and it is tested.

    `before` is the state before the round, `state` the one in which its clients have trained.
    """
    codec.beside(got.along, got.masks, got.votes)
    got, state = in_packets(world, state, fed.rule, got, codec)
    if codec.residual is not None:
        state = state.put("wire", {**state["wire"], "residual": codec.residual})
    state, record = finish(fed, state, sent, got)
    watch.lap("aggregate")
    record = replace(record, bytes=codec.sizes(), modes=codec.modes())
    return state, measured(world, before, sent, state, record, tests, watch), watch.seconds


def measured(
    world: World,
    before: State,
    sent: Broadcast,
    after: State,
    record: RoundRecord,
    tests: Testing,
    watch: Stopwatch,
) -> RoundRecord:
    """The record with tests of the new model, and with a diagnosis where one is due."""
    metrics = RunMetrics.of(world.task)
    scores = tests.model(after.model)
    average = None if after.average is None else tests.model(after.average)
    clients = tests.clients(after.model) if world.held and scores is not None else None
    watch.lap("evaluate")
    diagnosis = None
    if due(world, sent.round):
        diagnosis = diagnose(world, before.model, after.model, sent.draw, record, tests.everyone)
        watch.lap("diagnose")
    return replace(
        record,
        metrics=_scores(metrics, scores or {}),
        by_class=None if scores is None or not scores.by_class else tuple(map(finite, scores.by_class)),
        average=None if average is None else _scores(metrics, average),
        clients=None if clients is None else client_spread(clients, metrics),
        diagnosis=diagnosis,
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
        "scores": [finite(score) for score in scores],
    }


def _scores(metrics: RunMetrics, found: Mapping[str, float]) -> dict[str, float | None]:
    """Test results by the names of the run's metrics; None for a metric without a finite value."""
    return {name: finite(found.get(name, math.nan)) for name in metrics.names}
