"""`safari+`: predict what a missing client would have sent from the latest update of every client.

The server keeps the last update of each client it has heard from; some are fresh, some are old. From the arrivals
it estimates two things: how similar the updates of two clients are (a cosine per pair), and how fast updates
change (the cosine between a client's update and its own previous one, by age). Together these give, for each
missing client, the mixture of all latest updates that minimises the expected error:

    minimise E ‖Δ_j - Σ_v c_v y_v‖²   subject to c ≥ 0, Σ c = 1

- Where clients form groups, the mixture is roughly a mean over the group, fresh and old; where they do not, it is
  the client's own memory; in between, a compromise. Nothing has to be configured.
- Old updates are discounted by the decay that was observed. Least squares alone would then shrink the prediction;
  but the component that all updates share, the progress, is a small part of each, and a model that takes 90% of
  every step falls behind by 10%. Hence the constraint Σ c = 1.
- What clients have in common may change faster than what is a client's own: where few of many are asked, updates are
  many rounds old, and what all of them asked for then has been done since. Judged by the decay of their own updates
  alone, clients would be taken for less alike than they are, and memory for better. So the cosine of a pair at age a
  (0: both fresh) is

      alike · fading(a) + shift(a)

  where the shift is the mean of what the product leaves unexplained at that age. It counts only as far as it is beyond
  two standard errors; where nothing is beyond, as with ten clients that are all asked, the rule is as without it.
- Early on, every client that was ever heard contributes, so that the few with a good link do not train the model on
  their data alone. Once updates are mostly noise, fresh ones take precedence: a client with a sufficiently similar
  arrival is predicted from arrivals only. By its cosine an old update looks nearly as good, and would average out
  noise; but it was computed on an older model and asks again for what has been done since, and such delayed
  feedback slows learning.
- What the first few arrivals cut is held back until every client that was asked has been heard (`waiting`).

The rule uses no link probabilities, groups or labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from safari.aggregation.blend import blend
from safari.aggregation.checks import whole
from safari.aggregation.compensation import Compensation, Round, State, Weights
from safari.aggregation.memory import COLUMNS, blank, recall, remember
from safari.aggregation.rule import rule
from safari.aggregation.rules import check_pairs
from safari.aggregation.similarity import common_cosines
from safari.aggregation.waiting import OVER, hold_back, waits
from safari.bounds import at_least, positive_share, within

# Ages are binned by powers of two: 1, 2-3, 4-7, ... rounds.
_BUCKETS = 12
# One pseudo-observation at the prior mean regularises pairs with few observations.
_PRIOR = 1.0
# Prior for the cosine of a client's two consecutive updates, before any client was heard twice.
_SIGNAL = 0.5
# An age bin counts as observed from this (decayed) count on.
_ENOUGH = 0.5
# Assumed decay from one age bin to the next where nothing was observed.
_FADE = 0.7
# Lower bound on the cosine of consecutive updates.
_LEAST_SIGNAL = 0.02
# At most this many updates are mixed for one client; further ones would contribute next to nothing.
_MOST_FRIENDS = 32
# Numbers of mixtures computed at once: 32 MB in float64.
_AT_ONCE = 4_000_000
# Standard errors within which a shift may be chance.
_DOUBT = 2.0
# In rounds; longer than any run.
_LONGEST_WAIT = 1_000_000
# Pair matrices and the temporaries of a round then take about 1 GB.
_MOST_CLIENTS = 5_000


@dataclass(frozen=True)
class Options:
    """How the rule predicts; see `safari_plus`."""

    friends: bool
    memory: bool
    fade: bool
    close: float
    calm: float
    stay: bool
    patience: float
    keep: float
    wait: int


def safari_plus(
    *,
    friends: bool = True,
    memory: bool = True,
    fade: bool = True,
    close: float = 0.7,
    calm: float = 0.7,
    stay: bool = False,
    patience: float = 3.0,
    keep: float = 0.98,
    wait: int = 10,
) -> Compensation:
    """Predict each missing client from the latest update of everybody, as alike and as old as they are.

    The options serve ablations. `friends`: use other clients' updates; without it, only the client's own last
    one. `memory`: use remembered updates; without it, arrivals only. `fade`: discount old updates. `stay`:
    shares may sum to less than 1, and the remainder stays at the global model. `calm`: memory is used for every
    missing client while the cosine of a client's consecutive updates is at least this (0: always); below it,
    only for clients without an arrival whose similarity is at least `close` times that cosine. `patience`: the
    number of rounds over which noise averages out, so that variance counts that much less than bias. `keep`:
    the decay of old observations, per new one. `wait`: the most rounds for which cuts are held back while masks
    differ and a client that was asked has never been heard (0: cut as the arrivals do).
    """
    for name, value in (("close", close), ("calm", calm)):
        within(name, value, 0, 1)
    at_least("patience", patience, 1)
    positive_share("keep", keep)
    wait = within("wait", whole("wait", wait), 0, _LONGEST_WAIT)
    options = Options(friends, memory, fade, close, calm, stay, patience, keep, wait)

    def init(clients: int, size: int, device: torch.device) -> State:
        check_pairs("safari+", clients, _MOST_CLIENTS)
        return blank(clients, size, device) | _nothing_known(clients) | {"wait": torch.tensor([wait or OVER])}

    def learn(state: State, round: Round) -> State:
        known = {name: state[name].cpu() for name in _nothing_known(0)}
        if len(round.arrived):
            ids = torch.tensor(round.arrived_ids, dtype=torch.int64)
            known = _learn(known, cosines_with_memory(state, round), ids, state["age"].cpu(), options)
        return state | known

    def weigh(state: State, round: Round, sets: Tensor) -> Weights | None:
        left = int(state["wait"])
        if left == OVER or round.same_mask:
            return _weigh(state, round, sets, options)
        # Whether cuts are held back depends on the masks in each block.
        return (
            None if round.came is not None else hold_back(_weigh(state, round, sets, options), state, round)
        )

    def remember_all(state: State, round: Round) -> State:
        return remember(state, round) | {"wait": torch.tensor([waits(state, round)])}

    return rule(weigh, init, learn=learn, remember=remember_all, columns=COLUMNS)


def _nothing_known(clients: int) -> State:
    """What is learned about clients, as decayed sums with their counts; small, so it stays on the host."""
    pairs = torch.zeros(clients, clients, dtype=torch.float64)
    return {
        "alike": pairs,
        "met": pairs.clone(),
        "steady": torch.zeros(_BUCKETS, 2, dtype=torch.float64),
        # Of fresh pairs, then by the age of the older update: sum, count, sum of squares.
        "shift": torch.zeros(_BUCKETS + 1, 3, dtype=torch.float64),
    }


def cosines_with_memory(held: State, round: Round) -> Tensor:
    """The cosine of each arrival's update with every arrival's and with everybody's last one.

    Where parts of models arrived: over what came of both; NaN where that is nothing.
    """
    fresh = ((round.models - round.global_model) * round.masks)[:, : round.parameters]
    old = held["updates"][:, : round.parameters]
    if round.came is not None:
        came = round.came[:, : round.parameters]
        others_came = torch.cat([came, torch.ones_like(old, dtype=torch.bool)])
        return common_cosines(fresh, came, torch.cat([fresh, old]), others_came).double().cpu()
    lengths = torch.cat([torch.linalg.vector_norm(fresh, dim=1), torch.linalg.vector_norm(old, dim=1)])
    products = torch.cat([fresh @ fresh.T, fresh @ old.T], 1)
    cosines = products / lengths.clamp(min=1e-30) / lengths[: len(fresh), None].clamp(min=1e-30)
    # The only transfer from the device.
    cosines = cosines.double().cpu()
    if not bool(cosines.isfinite().all()):
        cosines = _wide_cosines(held, round)
    return cosines.clamp(-1, 1)


def _wide_cosines(held: State, round: Round) -> Tensor:
    """The same where squares of updates are beyond float32."""
    x, masks = round.global_model[: round.parameters].double(), round.masks[:, : round.parameters]
    fresh = torch.where(masks, round.models[:, : round.parameters].double() - x, 0.0)
    everybody = torch.cat([fresh, held["updates"][:, : round.parameters].double()])
    lengths = torch.linalg.vector_norm(everybody, dim=1).clamp(min=1e-30)
    cosines: Tensor = fresh @ everybody.T / lengths / lengths[: len(fresh), None]
    return cosines.cpu()


def _learn(known: State, cosines: Tensor, ids: Tensor, age: Tensor, options: Options) -> State:
    """Update the estimates with this round's cosines: of arrivals with themselves, each other and memory."""
    count = len(ids)
    heard = age >= 0
    steady = known["steady"].clone()
    own = cosines[:, count:][torch.arange(count), ids]
    again = heard[ids] & ~own.isnan()
    own = own[again]
    seen = torch.stack([own, torch.ones_like(own)], 1)
    steady = (options.keep * steady).index_add(0, _bucket(age[ids[again]] + 1), seen)

    # We observe a pair's cosine times the decay of its age; the sums accumulate the least-squares estimate.
    fading = torch.where(heard, _fading(steady, options)[_bucket(age + 1)], 0.0).expand(count, -1).clone()
    value = cosines[:, count:].clone()
    value[:, ids] = cosines[:, :count]
    fading[:, ids] = 1.0
    fading[torch.arange(count), ids] = 0.0
    fading, value = fading.masked_fill(value.isnan(), 0.0), value.nan_to_num(nan=0.0)
    pairs = fading > 0
    bins = _shift_bin(torch.where(heard, age + 1, 0).index_fill(0, ids, 0)).expand(count, -1)
    rest = (value - fading * _alike(known, _signal(steady))[ids])[pairs]
    # All pairs of an arrival share its noise: a round counts as one observation of each other client, not of each pair.
    seen = torch.stack([rest, torch.ones_like(rest), rest.square()], 1) / count
    shift = (options.keep * known["shift"]).index_add(0, bins[pairs], seen)
    value = torch.where(pairs, value - _shifts(shift)[bins], 0.0)
    top, bottom = torch.zeros_like(known["alike"]), torch.zeros_like(known["met"])
    top[ids] = value * fading
    bottom[ids] = fading * fading
    # The matrix is symmetric; two arrivals observe their pair once, not twice.
    both = torch.zeros(len(age), dtype=torch.bool).index_fill(0, ids, True)
    top = (top + top.T) / torch.where(both[:, None] & both[None, :], 2.0, 1.0)
    bottom = torch.maximum(bottom, bottom.T)
    decay = torch.where(bottom > 0, options.keep, 1.0)
    return {
        "alike": decay * known["alike"] + top,
        "met": decay * known["met"] + bottom,
        "steady": steady,
        "shift": shift,
    }


def _weigh(state: State, round: Round, sets: Tensor, options: Options) -> Weights:
    known = {name: state[name] for name in _nothing_known(0)}
    age, weights = state["age"].cpu(), round.weights_on_host
    arrived, cohort = (torch.tensor(ids, dtype=torch.int64) for ids in (round.arrived_ids, round.cohort_ids))
    came = torch.zeros(len(sets), len(age), dtype=torch.bool).index_copy(1, arrived, sets)
    old = torch.where(came, 0, torch.where(age >= 0, age + 1, -1))
    # An empty set is a round without arrivals: there are no stand-ins.
    absent = ~came[:, cohort] & sets.any(1, keepdim=True)
    clients = absent.any(0).nonzero()[:, 0]
    of, missing = absent[:, clients].nonzero().unbind(1)
    shares = torch.zeros(came.shape, dtype=torch.float64)
    stand_ins = torch.zeros(len(sets), len(clients), len(arrived), dtype=torch.float64)
    at_once = max(1, _AT_ONCE // max(len(age), min(len(age), _MOST_FRIENDS) ** 2))
    for rows in (slice(i, i + at_once) for i in range(0, len(of), at_once)):
        row = clients[missing[rows]]
        mixture = _mixture(known, old, cohort[row], options, of[rows])
        shares.index_add_(0, of[rows], weights[row, None] * mixture)
        stand_ins[of[rows], missing[rows]] = sets[of[rows]] * mixture[:, arrived]
    a = sets * (weights[torch.isin(cohort, arrived)] + shares[:, arrived])
    shares = shares.masked_fill(came, 0.0)
    recalled = (shares > 0).any(0).nonzero()[:, 0]
    if not len(recalled):
        return Weights(a, stand_ins=stand_ins, clients=clients)
    models = recall(state, round, recalled.to(round.cohort))
    return Weights(a, shares[:, recalled], models, stand_ins, clients)


def _mixture(
    known: State, old: Tensor, missing: Tensor, options: Options, of: Tensor | None = None
) -> Tensor:
    """The share of each client's latest update in the prediction of each missing client.

    Row j predicts client `missing[j]` in the set of arrivals `of[j]`, or all of them in the one set that there is.
    `old[s]`: the ages of the clients' updates in set s, in rounds; 0 for arrivals, -1 for clients never heard.
    """
    clients = old.shape[1]
    ages = old.expand(len(missing), -1) if of is None else old[of]
    fading, signal = _fading(known["steady"], options), _signal(known["steady"])
    alike = _alike(known, signal)
    own = torch.nn.functional.one_hot(missing, clients).bool()
    to = alike[missing] * torch.where(ages > 0, fading[_bucket(ages)], 1.0)
    to = torch.where(own, to, (to + _shifts(known["shift"])[_shift_bin(ages)]).clamp(max=signal))
    fresh = ages == 0
    allowed = ages >= 0 if options.memory else fresh
    if not options.friends:
        allowed = allowed & own
    # Updates with a negative cosine are excluded, even where they would cancel noise. Nothing is known
    # of a client that was never heard, so all are allowed.
    allowed = allowed & ((to > 0) | (ages.gather(1, missing[:, None]) < 0))
    if _seen(known["steady"]) is not None and signal < options.calm:
        close = allowed & fresh & (to >= options.close * signal)
        allowed = allowed & (fresh | ~close.any(1, keepdim=True))
    if clients > _MOST_FRIENDS:
        # The most similar ones, in the order of their ids.
        promise = to.masked_fill(~allowed, -torch.inf)
        best = promise.topk(_MOST_FRIENDS, dim=1).indices.sort(1).values
        among = _among(
            alike[best[:, :, None], best[:, None, :]], ages.gather(1, best), fading, signal, options
        )
        which = None if of is None else torch.arange(len(of))
        shares = blend(
            among, to.gather(1, best), allowed.gather(1, best), whole=not options.stay, which=which
        )
        return torch.zeros_like(to).scatter(1, best, shares)
    among = _among(alike, ages if of is None else old, fading, signal, options)
    return blend(among, to, allowed, whole=not options.stay, which=of)


def _among(alike: Tensor, ages: Tensor, fading: Tensor, signal: float, options: Options) -> Tensor:
    """The expected products of the clients' latest updates, given their ages."""
    apart = (ages[:, :, None] - ages[:, None, :]).abs()
    among = alike * torch.where(apart > 0, fading[_bucket(apart)], 1.0)
    # Noise averages out over `patience` rounds, but still breaks ties.
    level = torch.full(ages.shape, signal + (1 - signal) / options.patience, dtype=torch.float64)
    return among.diagonal_scatter(level, 0, 1, 2)


def _alike(known: State, signal: float) -> Tensor:
    """The expected noise-free cosine of every pair, shrunk towards the mean of all pairs."""
    met, sums = known["met"], known["alike"]
    mean = sums.sum() / met.sum().clamp(min=1e-30)
    pairs = (sums + _PRIOR * mean) / (met + _PRIOR)
    # No pair is more similar than a client is to itself.
    return pairs.clamp(max=signal).diagonal_scatter(torch.full((len(met),), signal).double())


def _shift_bin(ages: Tensor) -> Tensor:
    """The bin of pairs whose older update has this age: 0 for fresh ones."""
    return torch.where(ages > 0, _bucket(ages) + 1, 0)


def _shifts(shift: Tensor) -> Tensor:
    """What is added to the cosines of pairs, by bin: the mean residual, shrunk by how uncertain it is."""
    total, count, squares = shift.unbind(1)
    count = count + _PRIOR
    mean, error = total / count, squares / count / count
    return mean * (1 - _DOUBT**2 * error / mean.square().clamp(min=1e-30)).clamp(min=0.0)


def _seen(steady: Tensor) -> int | None:
    """The youngest age bin with observations of clients heard again; None where there are none."""
    ages = (steady[:, 1] >= _ENOUGH).nonzero()
    return int(ages[0]) if len(ages) else None


def _signal(steady: Tensor) -> float:
    """The cosine of a client's consecutive updates.

    With a small cohort out of many clients, hardly any client is heard twice in a row; then the youngest
    observed age is used.
    """
    total, count = steady[_seen(steady) or 0].tolist()
    return float(min(1.0, max(_LEAST_SIGNAL, (total + _PRIOR * _SIGNAL) / (count + _PRIOR))))


def _fading(steady: Tensor, options: Options) -> Tensor:
    """The decay of a cosine with age, relative to the youngest: non-increasing, starting at 1."""
    if not options.fade:
        return torch.ones(_BUCKETS, dtype=torch.float64)
    signal, first = _signal(steady), _seen(steady) or 0
    left = [1.0] * (first + 1)
    for total, count in steady[first + 1 :].tolist():
        usual = _FADE * left[-1]
        seen = (total / signal + _PRIOR * usual) / (count + _PRIOR)
        left.append(min(left[-1], max(0.0, seen)))
    return torch.tensor(left, dtype=torch.float64)


def _bucket(age: Tensor) -> Tensor:
    return torch.log2(age.clamp(min=1).double()).long().clamp(max=_BUCKETS - 1)
