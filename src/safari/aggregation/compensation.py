"""Rules for missing clients: each is a pair of pure functions, and all have one linear form.

With the models x_i that arrived and the global model x, every rule is

    x_next = x + Σ_i a_i (x_i - x) + Σ_j b_j (z_j - x)

where z_j is what the rule takes client j to have sent, from its memory of updates: z_j = x + y_j. So a rule
only has to choose the weights a and b. Where the weights do not sum to 1, something of x itself is left; that
part is kept within what the arrivals kept, so that a weight which all of them cut is cut, as in their mean.
A client's mask says what it kept, never which of its numbers are 0: a kept weight may well be 0.

Buffers follow the sum while it is a mean, that is while no weight is negative, the one left to x included.
They are statistics, not steps: a running variance that goes beyond all that was seen may fall below 0. Where
a sum is no mean, negative weights count as 0 for the buffers, and the others are scaled to sum to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from safari.errors import ConfigError

State = dict[str, Tensor]

# Weights that sum to 1 up to rounding leave nothing of the old model: a weight cut by all becomes exactly 0.
_ROUNDING = 1e-9


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Whole numbers of the host as a tensor on the device, without waiting for it."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


@dataclass(frozen=True)
class OnHost:
    """Copies of a round's small tensors on the host, so that reading them does not wait for the device.

    Args:
        of: The tensors `cohort`, `arrived` and `weights` that these are. They say nothing about other tensors.
        cohort: The ids of the cohort.
        arrived: The ids of the arrivals.
        weights: The weights of the cohort.
    """

    of: tuple[Tensor, Tensor, Tensor]
    cohort: list[int]
    arrived: list[int]
    weights: Tensor


@dataclass(frozen=True)
class Round:
    """All that a server knows in a round: whom it asked, who arrived, with what. No link, no probability.

    `cohort` and `arrived` are ascending client ids, `models[i]` is the model of `arrived[i]`, `masks[i]` the
    mask that it was trained with (True where kept, and for everything that is never pruned; possibly an
    expanded view of one row); `same_mask` says that every client has this mask, those who are missing
    included. `weights` are those of the cohort and sum to 1. The first `parameters` numbers of a model are
    its parameters, the rest are buffers. `up` is what clients sent beside their models, by name, a row for
    each arrival (docs/plugins.md, client algorithms). `lr` is the learning rate of the clients' steps in this
    round; 0 where the server was not told. `stand_ins` says who stood in for whom, as the rule decided: server steps
    see it; for the rule itself it is empty.

    `came` is None where models arrive whole or not at all, and where nothing arrived. Where parts of them arrive,
    it is True where a number of `models` came. What stands elsewhere says nothing about the client: a rule finds
    the global model's number there and a mask of False; gates, server steps and the server halves of client
    algorithms find 0 and the mask that the client sent. `heard` says of which numbers anything came, and
    `where_heard` leaves the others alone.

    `on_host` has ids and weights on the host, where they are known there; a rule asks for `cohort_ids`, `arrived_ids`
    and `missing_ids`, which are lists of whole numbers and on a GPU cheaper than `arrived.tolist()`, and for
    `weights_on_host`.
    """

    number: int
    global_model: Tensor
    cohort: Tensor
    arrived: Tensor
    models: Tensor
    masks: Tensor
    weights: Tensor
    parameters: int
    came: Tensor | None = None
    same_mask: bool = False
    up: Mapping[str, Tensor] = field(default_factory=dict)
    lr: float = 0.0
    stand_ins: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    on_host: OnHost | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.came is not None and not len(self.came):
            object.__setattr__(self, "came", None)

    @cached_property
    def _ids(self) -> tuple[list[int], list[int]]:
        if self._on_host is not None:
            return self._on_host.cohort, self._on_host.arrived
        both = torch.cat([self.cohort, self.arrived]).tolist()
        return both[: len(self.cohort)], both[len(self.cohort) :]

    @property
    def _on_host(self) -> OnHost | None:
        """The host's copies, unless they are of other tensors: a round may have been made from another one."""
        there = self.on_host
        mine = self.cohort, self.arrived, self.weights
        return there if there and all(a is b for a, b in zip(there.of, mine, strict=True)) else None

    @cached_property
    def weights_on_host(self) -> Tensor:
        """`weights` on the host."""
        return self.weights.cpu() if self._on_host is None else self._on_host.weights

    @property
    def cohort_ids(self) -> list[int]:
        """`cohort` on the host."""
        return self._ids[0]

    @property
    def arrived_ids(self) -> list[int]:
        """`arrived` on the host."""
        return self._ids[1]

    @cached_property
    def missing_ids(self) -> list[int]:
        """`missing` on the host."""
        arrived = set(self.arrived_ids)
        return [client for client in self.cohort_ids if client not in arrived]

    @cached_property
    def own(self) -> Tensor:
        """The weights of the arrivals."""
        return self._weights_of(True)

    @cached_property
    def others(self) -> Tensor:
        """The weights of the missing."""
        return self._weights_of(False)

    def _weights_of(self, present: bool) -> Tensor:
        if self._on_host is None:
            return self.weights[self.present if present else ~self.present]
        count = len(self.arrived_ids) if present else len(self.missing_ids)
        if count in (0, len(self.weights)):
            return self.weights[:count]
        rows = [row for row, came in enumerate(self._came) if came == present]
        return self.weights[on_device(rows, self.weights.device)]

    @cached_property
    def _came(self) -> list[bool]:
        arrived = set(self.arrived_ids)
        return [client in arrived for client in self.cohort_ids]

    @cached_property
    def kept(self) -> Tensor:
        """A bool for each number of the model: did any arrival keep it? True as well where nothing arrived:
        then nothing was cut."""
        if not len(self.masks):
            return self.masks.new_ones(self.masks.shape[1])
        if self.came is not None:
            return _any_row(self.masks & self.came) | ~self.heard
        # An expanded view is one mask; there is no need to read it once for every client.
        return self.masks[0] if self.masks.stride(0) == 0 else self.masks.any(0)

    @cached_property
    def heard(self) -> Tensor:
        """A bool for each number of the model: did it come from any arrival?"""
        if self.came is None:
            return self.masks.new_full((self.masks.shape[1],), len(self.arrived) > 0)
        return _any_row(self.came)

    def where_heard(self, new: Tensor, old: Tensor | float) -> Tensor:
        """`new`, but `old` for numbers that came from nobody; the last dimension is that of the model, or of its
        parameters.

        A step that keeps moments asks for this: that a number did not come is no gradient of 0.
        """
        return new if self.came is None else torch.where(self.heard[: new.shape[-1]], new, old)

    @property
    def present(self) -> Tensor:
        """A bool for each of the cohort: did it arrive?"""
        if self._on_host is None:
            return torch.isin(self.cohort, self.arrived)
        return torch.tensor(self._came, dtype=torch.bool).to(self.cohort.device, non_blocking=True)

    @property
    def missing(self) -> Tensor:
        """The ids that were asked and did not arrive, ascending."""
        if self._on_host is None:
            return self.cohort[~self.present]
        return on_device(self.missing_ids, self.cohort.device)


@dataclass(frozen=True)
class Decision:
    """A rule's answer: the weights of the arrivals, of the models it recalls, and who stood in for whom.

    `shares`: what the arrivals count for in sums of what they sent beside their models; `a` by default.
    """

    a: Tensor
    b: Tensor | None = None
    recalled: Tensor | None = None
    stand_ins: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    shares: Tensor | None = None


@dataclass(frozen=True)
class Weights:
    """Weights for several sets of arrivals at once, a row for each set.

    Args:
        a: The weights of the arrivals, `float64[sets, arrivals]` on the host; 0 for those outside the set.
        b: The weights of the models that are recalled, `float64[sets, recalled]` on the host.
        recalled: Those models, on the device of the round.
        stand_ins: `[sets, clients, arrivals]` on the host: the share of this client's weight that is given to this
            arrival; 0: none.
        clients: The rows of the cohort that `stand_ins` is about, ascending; None: all of them.
    """

    a: Tensor
    b: Tensor | None = None
    recalled: Tensor | None = None
    stand_ins: Tensor | None = None
    clients: Tensor | None = None

    def clients_of(self, round: Round) -> list[int]:
        """The ids of the clients that `stand_ins` has a row for."""
        cohort = round.cohort_ids
        return cohort if self.clients is None else [cohort[row] for row in self.clients.tolist()]


Init = Callable[[int, int, torch.device], State]
Weigh = Callable[[State, Round, Tensor], Weights | None]
Update = Callable[[State, Round], State]


def nothing(clients: int, size: int, device: torch.device) -> State:
    """The state of a rule that keeps none."""
    return {}


def unchanged(state: State, round: Round) -> State:
    """The state as it is."""
    return state


@dataclass(frozen=True)
class Phases:
    """The three things that a rule does in a round, in this order: learn, weigh, remember.

    Args:
        weigh: `weigh(state, round, sets) -> Weights`, the weights for many sets of arrivals at once; `sets` is
            `bool[sets, arrivals]` on the host, True for those of the round's arrivals that are in the set. Where
            models arrive whole there is one set, of all of them. Where they arrive in part, `round` is a range of the
            coordinates, with these columns of the state, and its `came` says of which set each coordinate is; then
            None says that each block has to be weighed as a round of its own. A weight depends on the set, not on
            the coordinates.
        learn: What the arrivals teach about clients, once in a round; pure.
        remember: What later rounds need of this one. Comes last, when the next model is known to be finite, and may
            write rows into the tensors that `Compensation.columns` names.
        estimate: `estimate(state, round) -> model` in place of `weigh`, for a rule that is no weighted sum.
    """

    weigh: Weigh | None = None
    learn: Update = unchanged
    remember: Update = unchanged
    estimate: Callable[[State, Round], Tensor] | None = None


@dataclass(frozen=True)
class Compensation:
    """`init(clients, size, device) -> state`; `apply(state, round) -> (decision, state)`, which is pure.

    `overrides_network` marks reference arms in which nothing is ever lost; with `needs_arrival`, nothing but
    the rounds in which the network would deliver no update at all. `name` is what messages about the rule begin
    with. `columns` names the tensors of the state with a number for each of the model's in their last dimension:
    where parts of models arrive, a rule decides for each block of coordinates, and sees these columns of the state.

    `phases` has one by one what `apply` does at once, for rules that are made from it by `rule`: all blocks are
    weighed in one call, and a memory of clients can be written in place.
    """

    init: Init
    apply: Callable[[State, Round], tuple[Decision, State]]
    overrides_network: bool = False
    name: str = "the rule"
    columns: tuple[str, ...] = ()
    needs_arrival: bool = False
    phases: Phases | None = None


def _any_row(rows: Tensor) -> Tensor:
    """`rows.any(0)` for at least one row of bools, which torch computes far slower on a CPU."""
    return rows.view(torch.uint8).amax(0).bool()


class NotFiniteError(ConfigError):
    """The next model would hold NaN or infinite numbers."""


def combine(round: Round, decision: Decision, name: str = "the rule") -> Tensor:
    """The weighted sum that every rule ends in; for buffers a mean. NotFiniteError where it is not finite.

    >>> view = Round(
    ...     number=0, global_model=torch.tensor([1.0, 1.0]), cohort=torch.arange(2), arrived=torch.arange(2),
    ...     models=torch.tensor([[2.0, 0.5], [2.0, 0.1]]), masks=torch.ones(2, 2, dtype=torch.bool),
    ...     weights=torch.tensor([0.5, 0.5]), parameters=1)
    >>> combine(view, Decision(a=torch.tensor([1.0, 1.0])))   # two steps of 1; (0.5 + 0.1) / 2
    tensor([3.0000, 0.3000])
    """
    weights = [decision.a] if decision.b is None else [decision.a, decision.b]
    out = _weighted_sum(round, decision, slice(None))
    # The only transfer from the device. A sum is finite only if all of its terms are.
    found = torch.cat([*(w.double() for w in weights), out.sum(0, keepdim=True).double()]).cpu()
    sums, below, at = [], 0.0, 0
    for w in weights:
        host = found[at : at + len(w)].to(w.dtype)
        at += len(w)
        sums.append(host.sum().item())
        if (host.numpy() < 0).any():
            below += host.clamp(max=0).sum().item()
    if not math.isfinite(found[at].item() + sum(sums)):
        _refuse_infinite(round, decision, out, name)
    rest = 1.0 - sums[0] - sum(sums[1:])
    rest = 0.0 if abs(rest) < _ROUNDING else rest
    out = with_rest(out, round, rest)
    negative = below + min(rest, 0.0)
    if not negative or round.parameters == len(out):
        return _finite(out, round, decision, name) if rest else out
    positive = replace(
        decision, a=decision.a.clamp(min=0), b=None if decision.b is None else decision.b.clamp(min=0)
    )
    # With the negative ones the weights sum to 1.
    part = slice(round.parameters, None)
    buffers = with_rest(_weighted_sum(round, positive, part), round, max(rest, 0.0), part) / (1 - negative)
    return _finite(torch.cat([out[: round.parameters], buffers]), round, decision, name)


def combine_blocks(round: Round, weights: Weights, block: Tensor, name: str = "the rule") -> Tensor:
    """`combine` with weights of its own for each block, for all coordinates at once.

    `block[k]` is the row of `weights` that applies to coordinate k. The weights are on the host, so that a
    single transfer from the device is left: whether the model is finite.
    """
    table = weights.a if weights.b is None else torch.cat([weights.a, weights.b], 1)
    negative = table.clamp(max=0).sum(1)
    rest = 1 - table.sum(1)
    rest = rest.masked_fill(rest.abs() < _ROUNDING, 0.0)
    negative += rest.clamp(max=0)
    table = torch.cat([table, rest[:, None]], 1)
    if bool(negative.any()) and round.parameters < len(block):
        # With the negative ones the weights sum to 1.
        table = torch.cat([table, table.clamp(min=0) / (1 - negative)[:, None]])
        block = torch.cat([block[: round.parameters], block[round.parameters :] + len(rest)])
    each = table.to(round.models.dtype).T.contiguous().to(round.models.device).index_select(1, block)
    count = len(round.models)
    out = (round.models * each[:count]).sum(0)
    if weights.recalled is not None:
        out += (weights.recalled * each[count:-1]).sum(0)
    if bool(rest.any()):
        out += round.global_model * round.kept * each[-1]
    if not bool(torch.isfinite(out.sum())):
        _refuse_infinite(round, Decision(weights.a, weights.b, weights.recalled), out, name)
    return out


def _weighted_sum(round: Round, decision: Decision, part: slice) -> Tensor:
    x, models = round.global_model[part], round.models[:, part]
    out = decision.a.to(x.dtype) @ models if len(decision.a) else torch.zeros_like(x)
    if decision.b is not None and decision.recalled is not None:
        out = out + decision.b.to(x.dtype) @ decision.recalled[:, part]
    return out


def with_rest(out: Tensor, round: Round, rest: float, part: slice = slice(None)) -> Tensor:
    """The sum with what is left to the old model, within what the arrivals kept."""
    if not rest:
        return out
    return out + rest * (round.global_model[part] * round.kept[part])


def _finite(out: Tensor, round: Round, decision: Decision, name: str) -> Tensor:
    """The model, when it is finite also with what was left to the old one."""
    if not bool(torch.isfinite(out.sum())):
        _refuse_infinite(round, decision, out, name)
    return out


def _refuse_infinite(round: Round, decision: Decision, out: Tensor, name: str) -> None:
    """Raise an error that names what is not finite: a part of the decision, or only the sum, if too large."""
    parts = {"weights a": decision.a, "weights b": decision.b, "models recalled": decision.recalled}
    for part, found in parts.items():
        count = 0 if found is None else int((~torch.isfinite(found)).sum())
        if count:
            raise NotFiniteError(
                f"{name}: {part} must be finite, got {count} numbers NaN or infinite in round {round.number}"
            )
    count = int((~torch.isfinite(out)).sum())
    if count:
        raise NotFiniteError(
            f"{name}: the new model must be finite, got {count} numbers NaN or infinite in round "
            f"{round.number}: its weights are too large"
        )
