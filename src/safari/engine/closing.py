"""How a round ends, in every engine: step 4 of Algorithm 1, and then the new model is tested, diagnosed and
written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from safari.engine.codec import heard_losses
from safari.engine.diagnosis import Everyone, diagnose, due
from safari.engine.opening import Opening
from safari.engine.packets import deliver
from safari.engine.state import State
from safari.engine.world import World
from safari.rounds.arrivals import Arrived, learned, noted
from safari.runs.measure import Facts, MaskCount, Stopwatch, record_of
from safari.runs.metrics import RunMetrics
from safari.runs.record import RoundRecord


def close_round(
    world: World,
    opening: Opening,
    arrived: Arrived,
    clients: dict[str, Tensor],
    watch: Stopwatch,
    *,
    test: Callable[[Tensor], Mapping[str, float] | None],
    test_clients: Callable[[Tensor], list[float]],
    everyone: Everyone,
) -> tuple[State, RoundRecord, dict[str, float]]:
    """The next state, the round's record, and the seconds each part took.

    `arrived` is what the uplink let through, and `clients` the client algorithm's next state. `test`, `test_clients`
    and `everyone` are the engine's ways to test a model, to test it on what each client holds out, and to train
    whoever was missing.
    """
    state, draw, codec = opening.state, opening.draw, opening.codec
    t, x = state.round, state.server.model
    codec.beside(arrived.up, arrived.masks, arrived.votes)
    arrived, came, packets = deliver(world, state, arrived, codec)
    same_mask = opening.masks.shared is not None
    server, outcome = state.server.step_stacked(
        arrived.ids,
        arrived.models,
        draw.clients,
        arrived.masks,
        came,
        same_mask=same_mask,
        up=arrived.up,
        lr=world.lr(t),
        shares=draw.by_client,
        in_place=True,
    )
    policy = learned(
        world.policy, opening.policy, world.config.rounds, world.layout, server, outcome, arrived
    )
    mask = opening.masks.base if opening.masks.announced else None
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
        trained=opening.training,
        outcome=outcome,
        losses=arrived.losses.tolist(),
        masks=_counted(world, arrived, same_mask),
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
    uplink, downlink = opening.links
    sampling = noted(world.sampling, opening.sampling, x, world.layout.parameters, outcome, arrived)
    losses = heard_losses(state.losses, arrived, outcome)
    after = State(server, uplink, downlink, policy, clients, mask, codec.residual, packets, sampling, losses)
    record = record_of(world.layout, facts)
    shares = draw.by_client
    if shares is not None:
        record = record.with_extra(shares={str(client): share for client, share in shares.items()})
    if codec.levels is not None:
        record = record.with_extra(levels=codec.levels)
    return after, record, watch.seconds


def _counted(world: World, arrived: Arrived, same_mask: bool) -> MaskCount:
    count = MaskCount(world.layout)
    if arrived.ids and same_mask:
        count.add(arrived.masks[0], len(arrived.ids))
    elif arrived.ids:
        count.add_rows(arrived.masks)
    return count


def _kept(state: State, mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The announced masks of the round before and of this one; before the first everything is kept."""
    if mask is None:
        return None
    return torch.ones_like(mask) if state.mask is None else state.mask, mask
