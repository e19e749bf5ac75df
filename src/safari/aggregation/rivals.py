"""Rules of others, as published, in the one linear form. Each docstring has the formula.

Buffers are a mean where a formula is not: see `compensation`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from safari.aggregation.compensation import Compensation, Round, State, Weights
from safari.aggregation.memory import COLUMNS, blank, recall, remember
from safari.aggregation.rule import members, own, rule, shares
from safari.aggregation.rules import check_pairs, stand_ins
from safari.aggregation.similarity import common_cosines, cosines, tally
from safari.bounds import at_least, positive_share, within
from safari.errors import ConfigError, brief, one_of

# Of rounds and of clients: as many as a config may ask for. The product of two of them fits into an int64.
_MOST = 10**9
_FORMS = ("plain", "normalised", "doubly-robust")


def stale() -> Compensation:
    """The missing are taken to send their last model again: z_j = x_j as it last arrived.

    One never heard has its weight shared by the arrivals.
    """

    def init(clients: int, size: int, device: torch.device) -> State:
        memory = blank(clients, size, device)
        return {"models": memory["updates"], "age": memory["age"]}

    def weigh(state: State, round: Round, sets: Tensor) -> Weights:
        heard, missing = (state["age"][round.cohort] >= 0).cpu(), _missing(round, sets)
        shared = (round.weights_on_host * (missing & ~heard)).sum(1, keepdim=True)
        a, b = own(round, sets) + shared * shares(round, sets), missing & heard
        return _recalling(round, a, b, lambda clients: state["models"][clients])

    def remember(state: State, round: Round) -> State:
        models = round.models
        if round.came is not None:
            heard = (state["age"][round.arrived] >= 0)[:, None]
            before = torch.where(heard, state["models"][round.arrived], models)
            models = torch.where(round.came, models, before)
        state["models"].index_copy_(0, round.arrived, models)
        age = torch.where(state["age"] >= 0, state["age"] + 1, state["age"])
        return state | {"age": age.index_fill(0, round.arrived, 0)}

    return rule(weigh, init, remember=remember, columns=("models",))


def fdms() -> Compensation:
    """FL-FDMS ("Friends to Help", 2022): the friend with the highest running mean of ½(1 + cos(Δ_u, Δ_v))."""

    def init(clients: int, size: int, device: torch.device) -> State:
        check_pairs("fdms", clients)
        zeros = torch.zeros(clients, clients, dtype=torch.float64, device=device)
        return {"similarity": zeros, "met": zeros.clone()}

    def learn(state: State, round: Round) -> State:
        if not len(round.arrived):
            return state
        updates = (round.models - round.global_model)[:, : round.parameters]
        if round.came is None:
            found = cosines(updates)
        else:
            came = round.came[:, : round.parameters]
            found = common_cosines(updates, came, updates, came)
        sums, counts = tally(state["similarity"], state["met"], round.arrived, 0.5 * (1 + found))
        return {"similarity": sums, "met": counts}

    def weigh(state: State, round: Round, sets: Tensor) -> Weights:
        means = torch.where(state["met"] > 0, state["similarity"] / state["met"], torch.nan)
        return stand_ins(round, sets, means)

    return rule(weigh, init, learn=learn)


def mifa(*, idle: bool = False, rescale: bool = False) -> Compensation:
    """MIFA (2021): x + Σ_i w_i y_i, where y_i is client i's latest update, old or new (0 at first).

    Gu et al., "Fast Federated Learning in the Presence of Arbitrary Device Unavailability", NeurIPS 2021. `idle`:
    step from memory alone in rounds in which nobody arrives, as published; otherwise such a round is lost, as
    with every other rule. `rescale`: remember an update divided by the learning rate of its round, and take it times
    that of the present one, as the paper and its authors' code do; only with `local.schedule` is this any different.
    """

    def rate(round: Round) -> float:
        # 0: the server was not told.
        return (round.lr or 1.0) if rescale else 1.0

    def weigh(state: State, round: Round, sets: Tensor) -> Weights:
        missing = ~members(round, sets) if idle else _missing(round, sets)
        return _recalling(
            round, own(round, sets), missing, lambda clients: recall(state, round, clients, rate(round))
        )

    def keep(state: State, round: Round) -> State:
        return remember(state, round, rate(round))

    return rule(weigh, blank, remember=keep, columns=COLUMNS)


def fedvarp() -> Compensation:
    """FedVARP (2022): x + Σ_{i arrived} w̃_i (Δ_i - y_i) + Σ_j w_j y_j; w̃ sums to 1 over the arrivals."""

    def weigh(state: State, round: Round, sets: Tensor) -> Weights:
        return corrected(round, sets, shares(round, sets), recall(state, round, round.cohort))

    return rule(weigh, blank, remember=remember, columns=COLUMNS)


def cluster_fedvarp(*, clusters: int = 2) -> Compensation:
    """Cluster FedVARP (2022): as fedvarp, with one memory a cluster: the mean update of its last arrivals.

    The server is given the clusters: `clusters` blocks of neighbouring ids.
    """
    at_least("clusters", clusters, 1)

    def init(clients: int, size: int, device: torch.device) -> State:
        blocks = _blocks(clients, clusters, device)
        return blank(clusters, size, device) | {"cluster": blocks}

    def rows_of(state: State) -> torch.Tensor:
        # Within the memory's rows, whatever a checkpoint says.
        return state["cluster"].clamp(0, clusters - 1)

    def weigh(state: State, round: Round, sets: Tensor) -> Weights:
        recalled = recall(state, round, rows_of(state)[round.cohort])
        return corrected(round, sets, shares(round, sets), recalled)

    def remember_means(state: State, round: Round) -> State:
        mine = rows_of(state)[round.arrived]
        heard = mine.unique()
        member = (mine == heard[:, None]).to(round.models.dtype)
        if round.came is None:
            means, came = member @ round.models / member.sum(1, keepdim=True), None
        else:
            heard_of = member @ round.came.to(member.dtype)
            came = heard_of > 0
            sums = member @ (round.models * round.came)
            means = torch.where(came, sums / heard_of.clamp(min=1), round.global_model)
        view = Round(
            number=round.number,
            global_model=round.global_model,
            cohort=heard,
            arrived=heard,
            models=means,
            masks=_unions(round.masks, mine, heard),
            weights=round.weights,
            parameters=round.parameters,
            came=came,
        )
        return remember(state, view)

    return rule(weigh, init, remember=remember_means, columns=COLUMNS)


def fedau(*, cutoff: int = 50) -> Compensation:
    """FedAU (2023): x + Σ_{i arrived} w_i ω_i Δ_i; ω_i is the mean gap between i's arrivals so far.

    A gap is cut off at `cutoff` rounds; before the first, ω is 1.
    """
    within("cutoff", cutoff, 1, _MOST)

    def init(clients: int, size: int, device: torch.device) -> State:
        zeros = torch.zeros(clients, dtype=torch.int64, device=device)
        return {"omega": torch.ones(clients, dtype=torch.float64, device=device), "gaps": zeros, "gap": zeros}

    def weigh(state: State, round: Round, sets: Tensor) -> Weights:
        return Weights(own(round, sets) * state["omega"][round.arrived].cpu())

    def remember(state: State, round: Round) -> State:
        omega, gaps = state["omega"], state["gaps"]
        asked = torch.zeros_like(gaps).index_fill(0, round.cohort, 1)
        gap = state["gap"] + asked
        ends = (gap >= cutoff) | torch.zeros_like(gaps, dtype=torch.bool).index_fill(0, round.arrived, True)
        mean = torch.where(gaps == 0, gap.double(), (gaps * omega + gap) / (gaps + 1))
        return {
            "omega": torch.where(ends, mean, omega),
            "gaps": gaps + ends,
            "gap": torch.where(ends, 0, gap),
        }

    return rule(weigh, init, remember=remember)


def known_p(
    *, p: float | Sequence[float] = 0.3, form: Literal["plain", "normalised", "doubly-robust"] = "plain"
) -> Compensation:
    """An oracle that knows the links: x + Σ_{i arrived} w_i Δ_i / p_i (`p`: a number, or a repeated list).

    `form`: `"plain"`, as above, which has no bias; `"normalised"` (Hájek): the weights w_i / p_i of the arrivals scaled
    to sum to 1, which trades a little bias for less variance; `"doubly-robust"`: what arrived corrects what is
    remembered, x + Σ_j w_j y_j + Σ_{i arrived} w_i (Δ_i - y_i) / p_i, with y_j the latest update of client j.
    """
    values = [p] if isinstance(p, int | float) else list(p)
    for value in values:
        positive_share("p", value)
    if not values:
        raise ConfigError("p must hold at least one number, got an empty list")
    if form not in _FORMS:
        raise ConfigError(one_of("form", form, _FORMS))

    def init(clients: int, size: int, device: torch.device) -> State:
        if clients % len(values):
            raise ConfigError(
                f"p must hold one number or a list whose length divides the {clients} clients; "
                f"got {len(values)} numbers"
            )
        known = {"p": torch.tensor(values, dtype=torch.float64, device=device).repeat(clients // len(values))}
        return known | blank(clients, size, device) if form == "doubly-robust" else known

    def weigh(state: State, round: Round, sets: Tensor) -> Weights:
        a = own(round, sets) / state["p"][round.arrived].cpu()
        if form == "plain":
            return Weights(a)
        if form == "normalised":
            return Weights(a / torch.where(sets.any(1), a.sum(1), 1.0)[:, None])
        return corrected(round, sets, a, recall(state, round, round.cohort))

    if form != "doubly-robust":
        return rule(weigh, init)
    return rule(weigh, init, remember=remember, columns=COLUMNS)


def few(*, heard: int = 2, clusters: int = 2) -> Compensation:
    """An oracle on a perfect network that listens to `heard` clients of each cluster in turn, for all of it.

    It tells what hearing few costs when nothing else is wrong. `clusters`: blocks of neighbouring ids, as in
    the division into groups.
    """
    within("heard", heard, 1, _MOST)
    at_least("clusters", clusters, 1)

    def init(clients: int, size: int, device: torch.device) -> State:
        return {"cluster": _blocks(clients, clusters, device)}

    def weigh(state: State, round: Round, sets: Tensor) -> Weights:
        mine = state["cluster"][round.arrived].cpu()
        member = mine[:, None] == mine[None, :]
        present = sets[:, None, :] & member
        size, rank = present.sum(2), present.tril(-1).sum(2)
        a = own(round, sets)
        chosen = a * ((rank - round.number * heard) % size.clamp(min=1) < heard)
        # The clients that are heard share the weight of their cluster.
        whole, part = a @ member.to(a.dtype), chosen @ member.to(a.dtype)
        return Weights(torch.where(sets, chosen * whole / part, 0.0))

    return dataclasses.replace(rule(weigh, init), overrides_network=True)


def _blocks(clients: int, clusters: int, device: torch.device) -> Tensor:
    if clusters > clients:
        raise ConfigError(f"clusters must be at most the {clients} clients, got {brief(clusters)}")
    return torch.arange(clients, device=device) * clusters // clients


def _unions(masks: Tensor, cluster: Tensor, heard: Tensor) -> Tensor:
    """A mask for each cluster in `heard`: what any of its arrivals kept. `cluster` has that of each row."""
    found = masks.new_empty((len(heard), masks.shape[1]))
    for row, c in enumerate(heard):
        found[row] = masks[cluster == c].any(0)
    return found


def corrected(round: Round, sets: Tensor, a: Tensor, recalled: Tensor) -> Weights:
    """Memory of everybody, corrected by the arrivals: Σ_j w_j y_j + Σ_i a_i (Δ_i - y_i); `recalled` has a row for each
    of the cohort."""
    b = round.weights_on_host * sets.any(1, keepdim=True)
    b[:, members(round, sets.new_ones(1, sets.shape[1]))[0]] -= a
    return Weights(a, b, recalled)


def _recalling(round: Round, a: Tensor, needed: Tensor, recall: Callable[[Tensor], Tensor]) -> Weights:
    """Weights with which clients of the cohort count by what is recalled of them; `needed` has a row for each set."""
    rows = needed.any(0).nonzero()[:, 0]
    if not len(rows):
        return Weights(a)
    recalled = recall(round.cohort[rows.to(round.cohort.device, non_blocking=True)])
    return Weights(a, (round.weights_on_host * needed)[:, rows], recalled)


def _missing(round: Round, sets: Tensor) -> Tensor:
    """Who is missing from each set of arrivals: nobody where it is empty, because then the round is lost, and the
    model stays even with a memory."""
    return ~members(round, sets) & sets.any(1, keepdim=True)
