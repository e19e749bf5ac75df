"""How a round ends, in every engine: with the new model averaged, tested, diagnosed, and written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from safari.aggregation import Outcome, Server
from safari.engine.codec import RoundCodec, heard_losses
from safari.engine.diagnosis import Everyone, diagnose, due
from safari.engine.state import State
from safari.engine.world import World
from safari.rounds.arrivals import Arrived, noted
from safari.runs.measure import Facts, MaskCount, Stopwatch, record_of
from safari.runs.metrics import RunMetrics
from safari.runs.record import RoundRecord
from safari.sampling import Draw
from safari.sampling import State as SamplingState

Link = dict[str, np.ndarray]


def close_round(
    world: World,
    state: State,
    server: Server,
    outcome: Outcome,
    *,
    sampled: tuple[Draw, SamplingState],
    arrived: Arrived,
    links: tuple[Link, Link],
    trained: Sequence[int],
    masks: MaskCount,
    codec: RoundCodec,
    watch: Stopwatch,
    policy: dict[str, Tensor],
    clients: dict[str, Tensor],
    mask: Tensor | None,
    packets: Link,
    test: Callable[[Tensor], Mapping[str, float] | None],
    test_clients: Callable[[Tensor], list[float]],
    everyone: Everyone,
) -> tuple[State, RoundRecord, dict[str, float]]:
    """The next state, the round's record, and the seconds each part took.

    `state` is the one before the round, `server` the one after it; `sampled` is who was asked, with the sampling's
    state before it has heard from them, and `arrived` what came; `links` are the next states of uplink and
    downlink, `policy` and `clients` those of the mask policy and of the client algorithm, `packets` that of the
    packets. `mask` is the one that the server announced for this round; None where clients work theirs out. `test`,
    `test_clients` and `everyone` are the engine's ways to test a model, to test it on what each client holds out,
    and to train whoever was missing.
    """
    t, x = state.round, state.server.model
    draw, sampling = sampled
    watch.lap("aggregate")
    scores = test(server.model)
    average_scores = None if server.average is None else test(server.average)
    by_client = test_clients(server.model) if world.held and scores is not None else None
    watch.lap("evaluate")
    diagnosis = None
    if due(world, t):
        diagnosis = diagnose(world, x, server.model, draw, outcome, everyone)
        watch.lap("diagnose")
    facts = Facts(
        round=t,
        trained=trained,
        outcome=outcome,
        losses=arrived.losses.tolist(),
        masks=masks,
        sizes=codec.sizes(),
        modes=codec.modes(),
        before=x,
        after=server.model,
        metrics=RunMetrics.of(world.task),
        scores=scores,
        average=average_scores,
        diagnosis=diagnosis,
        kept=_kept(state, mask),
        by_client=by_client,
    )
    uplink, downlink = links
    sampling = noted(world.sampling, sampling, x, world.layout.parameters, outcome, arrived)
    losses = heard_losses(state.losses, arrived, outcome)
    after = State(server, uplink, downlink, policy, clients, mask, codec.residual, packets, sampling, losses)
    record = record_of(world.layout, facts)
    shares = draw.by_client
    if shares is not None:
        record = record.with_extra(shares={str(client): share for client, share in shares.items()})
    if codec.levels is not None:
        record = record.with_extra(levels=codec.levels)
    return after, record, watch.seconds


def _kept(state: State, mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The announced masks of the round before and of this one; before the first everything is kept."""
    if mask is None:
        return None
    return torch.ones_like(mask) if state.mask is None else state.mask, mask
