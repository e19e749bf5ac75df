"""A round at the server: `begin` sends the model, `finish` makes the next one of what came (Algorithm 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from safari.aggregation import Outcome
from safari.federation.algorithm import vectors_along
from safari.federation.forms import Broadcast, Federation, State, Uploads
from safari.federation.record import record_of
from safari.pruning import Arrivals, MaskRound, Masks
from safari.rounds.masks import as_received
from safari.runs.record import RoundRecord
from safari.sampling import Draw, SamplingRound
from safari.seeds import generator


def init(fed: Federation) -> State:
    """The state before the first round."""
    device = fed.model.device
    state = fed.after(State(0, {"model": {}}), fed.server())
    if fed.policy is not None:
        state = state.put("policy", dict(fed.policy.init(fed.layout, device)))
    state = state.put("sampling", dict(fed.sampling.init(fed.clients, fed.parameters, device)))
    if fed.levels is not None:
        state = state.put("wire", {"losses": torch.full((2,), torch.nan, dtype=torch.float64)})
    return state


def begin(fed: Federation, state: State, draw: Draw | None = None) -> tuple[State, Broadcast]:
    """The round's broadcast, and the state from there on. `draw`: who is asked, where that was drawn before."""
    t, x = state.round, state.model
    masks, state = masks_of(fed, state, x)
    if draw is None:
        draw, state = cohort(fed, state)
    sent = Broadcast(
        round=t,
        lr=fed.lr(t),
        model=as_received(x, masks),
        masks=masks,
        along=vectors_along(fed.algorithm, state["algorithm"]),
        draw=draw,
        levels=None if fed.levels is None else fed.levels(state["wire"]["losses"]),
    )
    return state, sent


def masks_of(fed: Federation, state: State, x: Tensor) -> tuple[Masks, State]:
    """The policy's masks of a model in the round, and the state from there on.

    Without a policy clients score for themselves.
    """
    if fed.policy is None:
        return Masks(), state
    t = state.round
    score = None if fed.score is None else partial(fed.score, x, t)
    view = MaskRound(t, fed.rounds, x, fed.layout, fed.budget(t), generator(fed.seed, "policy", t), score)
    masks, after = fed.policy.apply(state["policy"], view)
    return masks, state.put("policy", dict(after))


def cohort(fed: Federation, state: State, weights: Sequence[float] | None = None) -> tuple[Draw, State]:
    """Draw the clients to ask in the round; also return the next state.

    `weights`: what clients count for in the draw, 0 for one that cannot be asked; by default `fed.weights`.
    """
    t = state.round
    counts = np.array(weights or fed.weights or np.ones(fed.clients), np.float64)
    view = SamplingRound(t, fed.cohort or fed.clients, counts, generator(fed.seed, "cohort", t))
    draw, after = fed.sampling.apply(state["sampling"], view)
    return draw, state.put("sampling", dict(after))


def finish(fed: Federation, state: State, sent: Broadcast, got: Uploads) -> tuple[State, RoundRecord]:
    """The next state, and the round's record, without tests of the new model and without bytes.

    `state` is the one that `begin` gave; a rule's memory of clients is written in place. A round in which nothing can
    be used is lost: the model stays.
    """
    before = state.mask
    state = cleared(fed, state, got.new)
    if got.weights is not None:
        state = state.put("clients", {"weight": torch.tensor(got.weights, dtype=torch.float64)})
    if got.received is not None:
        # Numbers that did not come are the global model's, so that nobody learns from them.
        got = replace(got, models=torch.where(got.received, got.models, state.model))
    shares = sent.draw.by_client if got.shares is None else got.shares
    server, outcome = fed.server(state).step_stacked(
        got.ids,
        got.models,
        got.asked,
        got.masks,
        got.received,
        same_mask=got.same_mask,
        up=got.along,
        lr=sent.lr,
        shares=shares,
        in_place=True,
    )
    outcome = replace(outcome, refused={**got.refused, **outcome.refused})
    x, state = state.model, fed.after(state, server)
    if not outcome.lost:
        state = _learned(fed, state, x, outcome, got)
    mask = sent.announced
    if mask is not None:
        state = state.put("model", {**state["model"], "mask": mask})
        kept = torch.ones_like(mask) if before is None else before, mask
    else:
        kept = x != 0, state.model != 0
    record = record_of(fed.layout, sent.round, outcome, got, kept)
    if shares is not None:
        record = record.with_extra(shares={str(client): share for client, share in shares.items()})
    if sent.levels is not None:
        record = record.with_extra(levels=sent.levels)
    return state, record


def _learned(fed: Federation, state: State, x: Tensor, outcome: Outcome, got: Uploads) -> State:
    """The state after policy, sampling and levels have learned from what was used; `x`: the model of the round."""
    rows = got.rows(outcome.arrived)
    if fed.policy is not None and outcome.shares is not None and outcome.own is not None:
        arrivals = Arrivals(
            number=state.round - 1,
            rounds=fed.rounds,
            model=state.model,
            layout=fed.layout,
            models=got.models[rows],
            weights=outcome.shares,
            own=outcome.own,
            votes=None if got.votes is None else got.votes[rows],
        )
        state = state.put("policy", dict(fed.policy.learn(state["policy"], arrivals)))
    if fed.sampling.learn is not None:
        masks = got.masks if len(got.masks) == 1 else got.masks[rows]
        updates = (got.models[rows, : fed.parameters] - x[: fed.parameters]) * masks[:, : fed.parameters]
        ids = torch.tensor(outcome.arrived, device=x.device)
        state = state.put("sampling", dict(fed.sampling.learn(state["sampling"], ids, updates)))
    if fed.levels is not None and got.losses is not None:
        latest = got.losses.double().cpu()[rows].mean()
        state = state.put("wire", {**state["wire"], "losses": reported(state["wire"]["losses"], latest)})
    return state


def reported(losses: Tensor, latest: Tensor) -> Tensor:
    """The first and the latest mean training loss after a round.

    A mean that is not a finite number above 0 has no root to go by: then nothing was heard.

    >>> reported(torch.tensor([torch.nan, torch.nan]), torch.tensor(2.0))
    tensor([2., 2.])
    """
    if not (math.isfinite(latest) and latest > 0):
        return losses
    return torch.stack([latest if bool(losses[0].isnan()) else losses[0], latest])


def cleared(fed: Federation, state: State, clients: Sequence[int]) -> State:
    """The state without what any part knows of these clients: their rows are as before the first round."""
    rows = sorted(set(clients))
    if not rows:
        return state
    first, axes = init(fed), client_axes(fed)
    # A first state does not know the norms of vectors that come beside the models: NaN for a client never heard.
    beside = {
        name: torch.full_like(norms, math.nan)
        for name, norms in state["gate"].items()
        if name not in first["gate"] and norms.shape == (fed.clients,) and norms.is_floating_point()
    }
    first = first.put("gate", {**first["gate"], **beside})
    axes |= {("gate", name): [0] for name in beside}
    parts = {
        part: {name: _cleared(part, name, tensor, first, axes, rows) for name, tensor in tensors.items()}
        for part, tensors in state.parts.items()
    }
    return replace(state, parts=parts)


def client_axes(fed: Federation) -> dict[tuple[str, str], list[int]]:
    """The axes of each tensor of the state that run over the clients: those that grow with one client more."""
    # One number is enough to see them; a whole model would be allocated for nothing.
    small = replace(fed, model=fed.model[:1], weights=None, policy=None)
    here, more = (init(replace(small, clients=n)) for n in (fed.clients, fed.clients + 1))
    return {
        (part, name): [i for i, (a, b) in enumerate(zip(tensor.shape, wide.shape, strict=True)) if a != b]
        for part, tensors in here.parts.items()
        for name, tensor in tensors.items()
        if (wide := more[part].get(name)) is not None and wide.ndim == tensor.ndim
    }


def _cleared(
    part: str,
    name: str,
    old: Tensor,
    first: State,
    axes: dict[tuple[str, str], list[int]],
    rows: Sequence[int],
) -> Tensor:
    start = first[part].get(name)
    if start is None or start.shape != old.shape:
        return old
    new, index = old.clone(), torch.tensor(rows, device=old.device)
    for axis in axes.get((part, name), ()):
        new = new.index_copy(axis, index, start.index_select(axis, index))
    return new
