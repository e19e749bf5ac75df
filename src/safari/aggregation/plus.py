"""`safari+`: every missing client is predicted from all that the server holds, and predictions are graded.

1. *Blend.* How alike two clients' updates are is a running mean of cosines. From it follows, for each missing
   client, the mixture of arrivals that is expected to come nearest to what it would have sent. Where clients
   fall into groups, that is about the mean of the group's arrivals; where they do not, a mean of all; where
   nobody is like it, little or nothing, and the client is taken to have stayed where it was.
2. *Balance.* Arrivals that are seldom heard speak louder in a blend, by the inverse of how often they arrive:
   otherwise the few with a good link would train the model on their data alone.
3. *Memory.* A client's own last update knows what nobody else's data can tell. How far to trust it at its age
   is measured: whenever a client arrives, both predictions of it are compared with what it really sent.

Nothing here knows a probability, a group, or a label.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from safari.aggregation.blend import blend
from safari.aggregation.compensation import Compensation, Decision, Round, State
from safari.aggregation.memory import blank, recall, remember
from safari.aggregation.rules import check_pairs, most_similar, names_of, share
from safari.aggregation.similarity import tally
from safari.errors import ConfigError, one_of

# Ages 0, 1-2, 3-6, 7-14, ... share a grade.
_BUCKETS = 12
# One imagined meeting at the mean of all steadies what has hardly been seen.
_PRIOR = 1.0
# A grade begins with half a trust in memory, and little weight on that.
_GRADE_PRIOR = 0.05
# What an update shares with the next one of the same client is at least this.
_LEAST_SIGNAL = 0.02
_MIXTURES = ("blend", "best", "mean")


@dataclass(frozen=True)
class Options:
    """How the rule predicts; see `safari_plus`."""

    mixture: str
    balance: bool
    memory: bool
    stay: bool
    patience: float
    keep: float


def safari_plus(
    *,
    mixture: str = "blend",
    balance: bool = True,
    memory: bool = True,
    stay: bool = True,
    patience: float = 3.0,
    keep: float = 0.98,
) -> Compensation:
    """Predict each missing client by a blend of arrivals and its own memory, by their observed errors.

    The options take the rule apart: `mixture` best (one friend) or mean (all arrivals) instead of the blend;
    no `balance` between often and seldom heard; no `memory`; no `stay`ing where nobody is alike. `patience`:
    over how many rounds noise may average out, so that it counts that much less than being wrong for good.
    `keep`: what an observation is worth after another one.
    """
    if mixture not in _MIXTURES:
        raise ConfigError(one_of("mixture", mixture, _MIXTURES))
    if not patience >= 1:
        raise ConfigError(f"patience must be at least 1, got {patience}")
    if not 0 < keep <= 1:
        raise ConfigError(f"keep must lie above 0 and be at most 1, got {keep}")
    options = Options(mixture, balance, memory, stay, patience, keep)

    def init(clients: int, size: int, device: torch.device) -> State:
        check_pairs("safari+", clients)
        return blank(clients, size, device) | _nothing_known(clients)

    def apply(state: State, round: Round) -> tuple[Decision, State]:
        known = {name: state[name].cpu() for name in _nothing_known(0)}
        known["heard"] = _count_heard(known["heard"], round, keep)
        held = {name: state[name] for name in ("updates", "kept", "age")}
        if not len(round.arrived):
            return Decision(share(round)), remember(held, round) | known
        known = _learn(known, _products(held, round), round.arrived.cpu(), state["age"].cpu(), options)
        return _decide(held, known, round, options), remember(held, round) | known

    return Compensation(init, apply)


def _nothing_known(clients: int) -> State:
    """What is learned about clients: small, and so always on the host.

    Running sums, each with its count: cosines of pairs, of a client with its own last update ("steady"),
    arrivals out of rounds asked ("heard"), and the grades of memory by age.
    """
    pairs = torch.zeros(clients, clients, dtype=torch.float64)
    columns = torch.zeros(clients, 2, dtype=torch.float64)
    return {
        "cosine": pairs,
        "met": pairs.clone(),
        "steady": columns,
        "heard": columns.clone(),
        "grades": torch.zeros(_BUCKETS, 2, dtype=torch.float64),
    }


def _products(held: State, round: Round) -> Tensor:
    """All inner products among the arrivals' updates, and their last ones: the one look at the device."""
    fresh = (round.models - round.global_model) * (round.models != 0)
    vectors = torch.cat([fresh, held["updates"][round.arrived]])[:, : round.parameters]
    return (vectors @ vectors.T).double().cpu()


def _count_heard(heard: Tensor, round: Round, keep: float) -> Tensor:
    asked, arrived = round.cohort.cpu(), round.arrived.cpu()
    out = heard.clone()
    out[asked] *= keep
    out[asked, 1] += 1
    out[arrived, 0] += 1
    return out


def _learn(known: State, products: Tensor, ids: Tensor, age: Tensor, options: Options) -> State:
    """Everything that the arrivals tell about how to predict them."""
    count = len(ids)
    norm = products.diagonal().sqrt().clamp(min=1e-30)
    cosine = (products / norm[:, None] / norm[None, :]).clamp(-1, 1)
    sums, met = tally(known["cosine"], known["met"], ids, cosine[:count, :count], options.keep)
    before = age[ids] >= 0
    steady = known["steady"].clone()
    again = torch.stack([cosine[:count, count:].diagonal(), torch.ones(count, dtype=torch.float64)], 1)
    steady[ids[before]] = options.keep * steady[ids[before]] + again[before]
    known = known | {"cosine": sums, "met": met, "steady": steady}
    if not options.memory or count < 2 or not bool(before.any()):
        return known
    seen = _compare(known, products, ids, options)[before]
    grades = (options.keep * known["grades"]).index_add(0, _bucket(age[ids[before]]), seen)
    return known | {"grades": grades}


def _compare(known: State, products: Tensor, ids: Tensor, options: Options) -> Tensor:
    """For each arrival the two parts of the share of memory that would have been best, ⟨Δ-f, y-f⟩ and ‖y-f‖²,
    where f blends the other arrivals and y is its own last update; noise is discounted by patience."""
    count = len(ids)
    others = ~torch.eye(count, dtype=torch.bool)
    c = _mixture(known, ids, ids, others, options)
    among, own, olds = products[:count, :count], products[:count, count:], products[count:, count:]
    size = among.diagonal()
    noise = size * (1 - _signal(known["steady"])[ids]) * (1 - 1 / options.patience)
    ff = ((c @ among) * c).sum(1)
    true_f, old_f = (c * among).sum(1), (c * own.T).sum(1)
    spread = (c * c) @ noise
    top = own.diagonal() - true_f - old_f + ff - spread
    bottom = olds.diagonal() - 2 * old_f + ff - spread - noise
    return torch.stack([top, bottom], 1) / size.clamp(min=1e-30)[:, None]


def _decide(held: State, known: State, round: Round, options: Options) -> Decision:
    missing, arrived, age = round.missing.cpu(), round.arrived.cpu(), held["age"].cpu()
    every = torch.ones(len(missing), len(arrived), dtype=torch.bool)
    c = _mixture(known, missing, arrived, every, options)
    trust = torch.zeros(len(missing), dtype=torch.float64)
    if options.memory:
        trust = torch.where(age[missing] >= 0, _trust(known["grades"])[_bucket(age[missing])], 0.0)
    present, weights = round.present.cpu(), round.weights.cpu()
    w = weights[~present]
    a = weights[present] + (w * (1 - trust)) @ c
    names = names_of(round, c * (trust < 1)[:, None])
    if not options.memory:
        return Decision(a.to(round.weights), stand_ins=names)
    return Decision(
        a.to(round.weights), (w * trust).to(round.weights), recall(held, round, round.missing), names
    )


def _mixture(known: State, rows: Tensor, ids: Tensor, allowed: Tensor, options: Options) -> Tensor:
    """How much of each arrival (`ids`) goes into the prediction of each of `rows`."""
    signal = _signal(known["steady"])
    alike = _alike(known, signal)
    to = alike[rows][:, ids]
    if options.mixture == "best":
        c = most_similar(torch.where(allowed, to, torch.nan)) * allowed
    elif options.mixture == "mean":
        c = allowed / allowed.sum(1, keepdim=True).clamp(min=1)
    else:
        among = alike[ids][:, ids]
        # Noise that is averaged out over `patience` rounds still decides between equals.
        among = among + torch.diag((1 - signal[ids]) / max(options.patience, 1))
        c = blend(among, to, allowed, whole=not options.stay)
    if options.balance:
        heard = known["heard"][ids]
        rate = (heard[:, 0] + _PRIOR) / (heard[:, 1] + _PRIOR)
        louder = c / rate
        c = louder * (c.sum(1) / louder.sum(1).clamp(min=1e-30))[:, None]
    return c


def _alike(known: State, signal: Tensor) -> Tensor:
    """The expected cosine of every pair, without noise; pairs that hardly met lean to the mean of all."""
    met = known["met"].clone().fill_diagonal_(0)
    sums = known["cosine"].clone().fill_diagonal_(0)
    mean = sums.sum() / met.sum().clamp(min=1e-30)
    pairs = (sums + _PRIOR * mean) / (met + _PRIOR)
    # Nobody is more like a client than the client itself.
    most = torch.minimum(signal[:, None], signal[None, :])
    return torch.minimum(pairs, most).diagonal_scatter(signal)


def _signal(steady: Tensor) -> Tensor:
    """How much of an update a client's next one shares: a cosine, between 0.02 and 1; one half if unknown."""
    total, count = steady.sum(0).tolist()
    mean = total / count if count > 0 else 0.5
    return ((steady[:, 0] + _PRIOR * mean) / (steady[:, 1] + _PRIOR)).clamp(_LEAST_SIGNAL, 1.0)


def _bucket(age: Tensor) -> Tensor:
    return torch.log2(age.clamp(min=0).double() + 1).long().clamp(max=_BUCKETS - 1)


def _trust(grades: Tensor) -> Tensor:
    """The best share of memory, by age; an age of which little is known leans to half of the one before."""
    found, before = [], 0.5
    for top, bottom in grades.tolist():
        best = (top + _GRADE_PRIOR * before) / (max(bottom, 0.0) + _GRADE_PRIOR)
        found.append(min(1.0, max(0.0, best)))
        before = 0.5 * found[-1]
    return torch.tensor(found, dtype=torch.float64)
