"""`blue`: the best linear unbiased estimate of what all clients together would have sent.

The server keeps the latest update y_v of every client, g_v rounds old (0: it has just arrived). What is missing is
estimated at once, as one sum, instead of client by client:

    minimise  E ‖Σ_j w_j u_j - Σ_v a_v y_v‖²   subject to  a ≥ 0,  Σ a = 1

with u_j the update of client j of this round. An update is a part that all share, a part of the client's own, and
noise. Three things are learned from the cosines of arrivals with each other and with what is remembered:

    c φ(g)      of updates of two clients, g rounds apart: what all share, and how long that lasts
    r ψ(g)      what a client's update has in common with its own of g rounds before beyond that; ψ(0) = 1
    R_vj        what those of two clients have in common beyond it: positive within a group; R_vv = r

    M_vw = c φ(|g_v - g_w|) + R_vw ψ(|g_v - g_w|) + [v = w] ridge (1 - c - r) (1 + (1/ψ(g_v) - 1)³) / (m w_v)
    b_v  = c φ(g_v) + ψ(g_v) Σ_j w_j R_vj            minimise  aᵀ M a - 2 bᵀ a

Known rules are its limits. Where clients' own parts do not last and nobody is alike, memory is not worth its noise,
and the estimate is the mean of the arrivals (`drop`). Where groups differ, arrivals speak for their group. Where own
parts last, every client counts with its latest update, old or new (MIFA). The cube keeps what lies between them short:
at ψ = ½ the noise of an old update counts twice. The common part never decides between arrivals: as Σ a = 1, it
cancels.

Two constants were chosen on the digits, and early rounds depend on them: before an age was observed, ψ is taken to fall
to 0.6 of itself when the age doubles, and noise counts `ridge` times.

The rule uses no link probabilities, groups or labels. What the first few arrivals cut is held back until every client
that was asked has been heard (`waiting`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from safari.aggregation.blend import blend
from safari.aggregation.checks import whole
from safari.aggregation.compensation import Compensation, Round, State, Weights
from safari.aggregation.memory import COLUMNS, blank, recall, remember
from safari.aggregation.plus import cosines_with_memory
from safari.aggregation.rule import rule
from safari.aggregation.rules import check_pairs, stand_ins
from safari.aggregation.waiting import OVER, hold_back, waits
from safari.bounds import positive_share, within

# Ages by powers of two: 0 for arrivals, then 1, 2-3, 4-7, ... rounds.
_BINS = 12
# How many observations a prior counts for.
_PRIOR = 1.0
# Prior of r; below the second, hardly anything of a client's own lasts; prior of ψ from one bin of ages to the next.
_OWN, _LEAST, _FADE = 0.3, 0.2, 0.6
# Beyond it, estimates no longer count.
_LARGEST_RIDGE = 1_000_000
# In rounds; longer than any run.
_LONGEST_WAIT = 1_000_000
# Clients whose updates are mixed, at most; of more, those last heard. It bounds the cost of a round: 512³.
_MOST = 512
# Pair matrices and the temporaries of a round then take about 1 GB.
_MOST_CLIENTS = 5_000
# Numbers in a stack of matrices: 32 MB in float64.
_AT_ONCE = 4_000_000


def blue(*, ridge: float = 10.0, keep: float = 0.98, wait: int = 10) -> Compensation:
    """Estimate the sum of all clients' updates from the latest of each, by how alike they are and how long they last.

    `ridge`: how much the noise of a single update counts, beside its systematic error; the larger, the more evenly
    updates are weighted. `keep`: the decay of old observations, per new one. `wait`: the most rounds for which cuts are
    held back while masks differ and a client that was asked has never been heard (0: cut as the arrivals do).
    """
    within("ridge", ridge, 0, _LARGEST_RIDGE)
    positive_share("keep", keep)
    wait = within("wait", whole("wait", wait), 0, _LONGEST_WAIT)

    def init(clients: int, size: int, device: torch.device) -> State:
        check_pairs("blue", clients, _MOST_CLIENTS)
        return blank(clients, size, device) | _nothing_known(clients) | {"wait": torch.tensor([wait or OVER])}

    def learn(state: State, round: Round) -> State:
        if not len(round.arrived):
            return state
        known = {name: state[name].cpu() for name in _nothing_known(0)}
        ids = torch.tensor(round.arrived_ids, dtype=torch.int64)
        return state | _learn(known, cosines_with_memory(state, round), ids, state["age"].cpu(), keep)

    def weigh(state: State, round: Round, sets: Tensor) -> Weights | None:
        left = int(state["wait"])
        if left == OVER or round.same_mask:
            return _weigh(state, round, sets, ridge)
        # Whether cuts are held back depends on the masks in each block.
        return None if round.came is not None else hold_back(_weigh(state, round, sets, ridge), state, round)

    def remember_all(state: State, round: Round) -> State:
        return remember(state, round) | {"wait": torch.tensor([waits(state, round)])}

    return rule(weigh, init, learn=learn, remember=remember_all, columns=COLUMNS)


def _nothing_known(clients: int) -> State:
    """Decayed sums and counts of cosines: of each pair, of all pairs by age, of clients with themselves by age."""
    pairs, ages = (
        torch.zeros(clients, clients, dtype=torch.float64),
        torch.zeros(_BINS, 2, dtype=torch.float64),
    )
    return {"alike": pairs, "met": pairs.clone(), "shared": ages, "steady": ages.clone()}


def _learn(known: State, cosines: Tensor, ids: Tensor, age: Tensor, keep: float) -> State:
    """Update the estimates with the cosines of each arrival with the arrivals, and with everybody's last update."""
    count, everybody = len(ids), len(age)
    c, phi, _, psi = _curves(known)
    old, value = cosines[:, count:], cosines[:, count:].clone()
    value[:, ids] = cosines[:, :count]
    itself = torch.nn.functional.one_hot(ids, everybody).bool()
    bins = torch.where(age >= 0, _bin(age + 1), 0)
    now = bins.index_fill(0, ids, 0)
    # What a pair has in common beyond what all share is seen times ψ: least squares.
    seen = ((age >= 0).index_fill(0, ids, True) & ~itself & ~value.isnan()).double()
    excess = (value.nan_to_num() - c * phi[now]) * seen
    top, bottom = (torch.zeros_like(known["alike"]) for _ in range(2))
    top[ids], bottom[ids] = excess * psi[now], seen * psi[now].square()
    both = itself.any(0)
    top = (top + top.T) / torch.where(both[:, None] & both, 2.0, 1.0)
    bottom = torch.maximum(bottom, bottom.T)
    decay = torch.where(bottom > 0, keep, 1.0)
    alike, met = decay * known["alike"] + top, decay * known["met"] + bottom

    def tally(sums: Tensor, values: Tensor, at: Tensor, among: Tensor) -> Tensor:
        # All pairs of an arrival share its noise: a round is one observation of each other client, not of each pair.
        among = among & ~values.isnan()
        found = torch.stack([values[among], torch.ones_like(values[among])], 1) / count
        return sums.index_add(0, at.expand_as(values)[among], found)

    apart = (alike / (met + _PRIOR))[ids] * psi[bins]
    remembered = (age >= 0).expand_as(old)
    fresh = tally(keep * known["shared"], cosines[:, :count], torch.zeros_like(ids), ~itself[:, ids])
    return {
        "alike": alike,
        "met": met,
        "shared": tally(fresh, old - apart, bins, remembered & ~itself),
        "steady": tally(keep * known["steady"], old, bins, remembered & itself),
    }


def _curves(known: State) -> tuple[float, Tensor, float, Tensor]:
    """c, φ by bins of ages, r and ψ."""
    total, count = known["shared"].unbind(1)
    level = total[0] / (count[0] + _PRIOR / 2) if count[0] > 0 else total.sum() / (count.sum() + _PRIOR / 2)
    c = max(float(level), 0.0)
    phi = _falling(total[1:] / max(c, 1e-3), count[1:])
    total, count = known["steady"].unbind(1)
    beyond = total - count * c * phi
    # With few of many clients asked, hardly any is heard twice in a row: then the youngest age that was seen.
    first = int((count >= _PRIOR / 2).int().argmax().clamp(min=1))
    r = float(((beyond[first] + _PRIOR * _OWN) / (count[first] + _PRIOR)).clamp(0, 1))
    least = max(r, _LEAST)
    return c, phi, r, _falling(beyond[1:] / least, count[1:], first, r / least)


def _falling(total: Tensor, count: Tensor, first: int = 0, then: float = 1.0) -> Tensor:
    """A curve that begins at 1 and never rises: means by bins; up to the bin `first` it is `then`, without looking."""
    left = [1.0]
    for k, (sum_, seen) in enumerate(zip(total.tolist(), count.tolist(), strict=True), start=1):
        usual = left[-1] * (_FADE if k > 1 else 1.0)
        found = (sum_ + _PRIOR * usual) / (seen + _PRIOR)
        left.append(then if k <= first else min(left[-1], max(0.0, found)))
    return torch.tensor(left, dtype=torch.float64)


def _similarity(known: State) -> Tensor:
    """Cosine of each pair in excess of what all clients share, shrunk towards 0; NaN without observations."""
    alike, met = known["alike"].cpu(), known["met"].cpu()
    return torch.where(met > 0, alike / (met + _PRIOR), torch.nan)


def _shares(state: State, round: Round, sets: Tensor, ridge: float) -> Tensor:
    """`float64[sets, clients]`: the weight of everybody's latest update, for each of many sets of arrivals."""
    age, arrived = state["age"].cpu(), torch.tensor(round.arrived_ids, dtype=torch.int64)
    ages = torch.where(age >= 0, age + 1, -1).repeat(len(sets), 1)
    ages[:, arrived] = torch.where(sets, 0, ages[:, arrived])
    weights = torch.zeros(len(age), dtype=torch.float64)
    weights[round.cohort_ids] = round.weights_on_host
    found = torch.zeros(len(sets), len(age), dtype=torch.float64)
    # The youngest first, but in the order of their ids.
    last = torch.where(ages >= 0, ages, torch.iinfo(torch.int64).max).amin(0)
    who = last.argsort(stable=True)[:_MOST].sort().values
    c, phi, r, psi = _curves({name: state[name].cpu() for name in ("shared", "steady")})
    alike = _similarity(state).nan_to_num(nan=0.0).clamp(max=r).fill_diagonal_(r)
    towards = (alike @ weights)[who]
    # Those who were not asked are as good as the mean of those who were.
    size = torch.where(weights > 0, weights * len(round.cohort), 1.0)[who]
    noise = ridge * max(1e-4, 1 - c - r) / size
    rows = max(1, _AT_ONCE // len(who) ** 2)
    for part in (slice(i, i + rows) for i in range(0, len(sets), rows)):
        g = ages[part][:, who]
        bins, apart = _bin(g), _bin((g[:, :, None] - g[:, None, :]).abs())
        gone = 1 + (1 / psi[bins].clamp(min=1e-3) - 1) ** 3
        among = c * phi[apart] + alike[who][:, who] * psi[apart] + torch.diag_embed(noise * gone)
        allowed = (g >= 0) & sets[part].any(1, keepdim=True)
        solved = blend(
            among,
            c * phi[bins] + psi[bins] * towards,
            allowed,
            whole=True,
            which=torch.arange(len(g)),
            near=torch.where(g == 0, weights[who], 0.0),
        )
        found[part] = found[part].index_copy(1, who, solved)
    return found


def _weigh(state: State, round: Round, sets: Tensor, ridge: float) -> Weights:
    weights = _shares(state, round, sets, ridge)
    a = weights[:, round.arrived_ids] * sets
    old = weights.clone()
    old[:, round.arrived_ids] -= a
    recalled = (old > 0).any(0).nonzero()[:, 0]
    # Nobody stands in for a single client here; the arrival that is most like it is named.
    named = stand_ins(round, sets, _similarity(state).to(round.weights.device))
    if not len(recalled):
        return replace(named, a=a)
    return replace(named, a=a, b=old[:, recalled], recalled=recall(state, round, recalled.to(round.cohort)))


def _bin(ages: Tensor) -> Tensor:
    return torch.where(ages > 0, torch.log2(ages.clamp(min=1).double()).long().clamp(max=_BINS - 2) + 1, 0)
