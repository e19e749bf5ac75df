"""Rules of others, as published, in the one linear form. Each docstring has the formula.

Buffers are a mean where a formula is not: see `compensation`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from safari.aggregation.compensation import BlockWeights, Compensation, Decision, Round, State, learning
from safari.aggregation.memory import COLUMNS, blank, recall, remember
from safari.aggregation.rules import (
    check_pairs,
    members,
    most_similar,
    own,
    share,
    shares,
    stand_in,
    stand_ins,
)
from safari.aggregation.similarity import common_cosines, cosines, tally
from safari.bounds import at_least, positive_share, within
from safari.errors import ConfigError, brief

# Of rounds and of clients: as many as a config may ask for. The product of two of them fits into an int64.
_MOST = 10**9


def stale() -> Compensation:
    """The missing are taken to send their last model again: z_j = x_j as it last arrived.

    One never heard has its weight shared by the arrivals.
    """

    def init(clients: int, size: int, device: torch.device) -> State:
        memory = blank(clients, size, device)
        return {"models": memory["updates"], "age": memory["age"]}

    def apply(state: State, round: Round) -> tuple[Decision, State]:
        heard = state["age"][round.cohort] >= 0
        present = round.present
        recalled = heard & ~present
        shared = round.weights[~present & ~heard].sum()
        a = round.own + shared * share(round)
        b = round.weights[recalled]
        age = torch.where(state["age"] >= 0, state["age"] + 1, state["age"])
        models = round.models
        if round.came is not None:
            before = torch.where(
                (state["age"][round.arrived] >= 0)[:, None], state["models"][round.arrived], models
            )
            models = torch.where(round.came, models, before)
        after = {
            "models": state["models"].index_copy(0, round.arrived, models),
            "age": age.index_fill(0, round.arrived, 0),
        }
        return _if_any(round, Decision(a, b, state["models"][round.cohort[recalled]])), after

    def weigh(state: State, round: Round, sets: Tensor) -> BlockWeights:
        heard, weights = (state["age"][round.cohort] >= 0).cpu(), round.weights.cpu()
        missing = _missing(round, sets)
        shared = (weights * (missing & ~heard)).sum(1, keepdim=True)
        a = own(round, sets) + shared * shares(round, sets)
        return BlockWeights(a, weights * (missing & heard), state["models"][round.cohort])

    return Compensation(init, apply, columns=("models",), weigh=weigh)


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

    def respond(state: State, round: Round) -> tuple[Decision, State]:
        if not len(round.arrived):
            return Decision(share(round)), state
        return stand_in(round, most_similar(means(state)[round.missing][:, round.arrived])), state

    def weigh(state: State, round: Round, sets: Tensor) -> BlockWeights:
        return stand_ins(round, sets, means(state))

    def means(state: State) -> Tensor:
        return torch.where(state["met"] > 0, state["similarity"] / state["met"], torch.nan)

    return learning(init, learn, respond, weigh=weigh)


def mifa(*, idle: bool = False) -> Compensation:
    """MIFA (2021): x + Σ_i w_i y_i, where y_i is client i's latest update, old or new (0 at first).

    Gu et al., "Fast Federated Learning in the Presence of Arbitrary Device Unavailability", NeurIPS 2021. `idle`:
    step from memory alone in rounds in which nobody arrives, as published; otherwise such a round is lost, as
    with every other rule.
    """

    def apply(state: State, round: Round) -> tuple[Decision, State]:
        decision = Decision(round.own, round.others, recall(state, round, round.missing))
        return decision if idle else _if_any(round, decision), remember(state, round)

    def weigh(state: State, round: Round, sets: Tensor) -> BlockWeights:
        missing = ~members(round, sets) if idle else _missing(round, sets)
        recalled = recall(state, round, round.cohort)
        return BlockWeights(own(round, sets), round.weights.cpu() * missing, recalled)

    return Compensation(blank, apply, columns=COLUMNS, weigh=weigh)


def fedvarp() -> Compensation:
    """FedVARP (2022): x + Σ_{i arrived} w̃_i (Δ_i - y_i) + Σ_j w_j y_j; w̃ sums to 1 over the arrivals."""

    def apply(state: State, round: Round) -> tuple[Decision, State]:
        return _varp(round, recall(state, round, round.cohort)), remember(state, round)

    def weigh(state: State, round: Round, sets: Tensor) -> BlockWeights:
        return _varp_blocks(round, sets, recall(state, round, round.cohort))

    return Compensation(blank, apply, columns=COLUMNS, weigh=weigh)


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

    def apply(state: State, round: Round) -> tuple[Decision, State]:
        cluster = rows_of(state)
        decision = _varp(round, recall(state, round, cluster[round.cohort]))
        mine = cluster[round.arrived]
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
        memory = {name: state[name] for name in ("updates", "kept", "age")}
        return decision, remember(memory, view) | {"cluster": state["cluster"]}

    def weigh(state: State, round: Round, sets: Tensor) -> BlockWeights:
        return _varp_blocks(round, sets, recall(state, round, rows_of(state)[round.cohort]))

    return Compensation(init, apply, columns=COLUMNS, weigh=weigh)


def fedau(*, cutoff: int = 50) -> Compensation:
    """FedAU (2023): x + Σ_{i arrived} w_i ω_i Δ_i; ω_i is the mean gap between i's arrivals so far.

    A gap is cut off at `cutoff` rounds; before the first, ω is 1.
    """
    within("cutoff", cutoff, 1, _MOST)

    def init(clients: int, size: int, device: torch.device) -> State:
        zeros = torch.zeros(clients, dtype=torch.int64, device=device)
        return {"omega": torch.ones(clients, dtype=torch.float64, device=device), "gaps": zeros, "gap": zeros}

    def apply(state: State, round: Round) -> tuple[Decision, State]:
        omega, gaps = state["omega"], state["gaps"]
        decision = Decision(round.own * omega[round.arrived])
        asked = torch.zeros_like(gaps).index_fill(0, round.cohort, 1)
        gap = state["gap"] + asked
        ends = (gap >= cutoff) | torch.zeros_like(gaps, dtype=torch.bool).index_fill(0, round.arrived, True)
        mean = torch.where(gaps == 0, gap.double(), (gaps * omega + gap) / (gaps + 1))
        after = {
            "omega": torch.where(ends, mean, omega),
            "gaps": gaps + ends,
            "gap": torch.where(ends, 0, gap),
        }
        return decision, after

    def weigh(state: State, round: Round, sets: Tensor) -> BlockWeights:
        return BlockWeights(own(round, sets) * state["omega"][round.arrived].cpu())

    return Compensation(init, apply, weigh=weigh)


def known_p(*, p: float | Sequence[float] = 0.3) -> Compensation:
    """An oracle that knows the links: x + Σ_{i arrived} w_i Δ_i / p_i (`p`: a number, or a repeated list)."""
    values = [p] if isinstance(p, int | float) else list(p)
    for value in values:
        positive_share("p", value)
    if not values:
        raise ConfigError("p must hold at least one number, got an empty list")

    def init(clients: int, size: int, device: torch.device) -> State:
        if clients % len(values):
            raise ConfigError(
                f"p must hold one number or a list whose length divides the {clients} clients; "
                f"got {len(values)} numbers"
            )
        whole = torch.tensor(values, dtype=torch.float64, device=device)
        return {"p": whole.repeat(clients // len(values))}

    def apply(state: State, round: Round) -> tuple[Decision, State]:
        return Decision(round.own / state["p"][round.arrived]), state

    def weigh(state: State, round: Round, sets: Tensor) -> BlockWeights:
        return BlockWeights(own(round, sets) / state["p"][round.arrived].cpu())

    return Compensation(init, apply, weigh=weigh)


def few(*, heard: int = 2, clusters: int = 2) -> Compensation:
    """An oracle on a perfect network that listens to `heard` clients of each cluster in turn, for all of it.

    It tells what hearing few costs when nothing else is wrong. `clusters`: blocks of neighbouring ids, as in
    the division into groups.
    """
    within("heard", heard, 1, _MOST)
    at_least("clusters", clusters, 1)

    def apply(state: State, round: Round) -> tuple[Decision, State]:
        mine = state["cluster"][round.arrived]
        member = mine[:, None] == mine[None, :]
        size = member.sum(1)
        rank = member.tril(-1).sum(1)
        a = round.own
        chosen = a * ((rank - round.number * heard) % size < heard)
        # The clients that are heard share the weight of their cluster.
        whole, part = member.to(a.dtype) @ a, member.to(a.dtype) @ chosen
        return Decision(chosen * whole / part), state

    def init(clients: int, size: int, device: torch.device) -> State:
        return {"cluster": _blocks(clients, clusters, device)}

    return Compensation(init, apply, overrides_network=True)


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


def _varp(round: Round, recalled: Tensor) -> Decision:
    """The variance-reduced form over the cohort: recalled has a row for each of it."""
    a = share(round)
    b = round.weights.clone()
    b[round.present] -= a
    return _if_any(round, Decision(a, b, recalled))


def _varp_blocks(round: Round, sets: Tensor, recalled: Tensor) -> BlockWeights:
    """The same for many sets of arrivals at once."""
    a = shares(round, sets)
    b = round.weights.cpu() * sets.any(1, keepdim=True)
    b[:, round.present.cpu()] -= a
    return BlockWeights(a, b, recalled)


def _missing(round: Round, sets: Tensor) -> Tensor:
    """Who is to be recalled for each set of arrivals: nobody where the set is empty, as in `_if_any`."""
    return ~members(round, sets) & sets.any(1, keepdim=True)


def _if_any(round: Round, decision: Decision) -> Decision:
    """The decision; but when nobody arrived the round is lost, and the model stays even with a memory."""
    return decision if len(round.arrived) else Decision(share(round))
