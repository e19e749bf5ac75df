"""Common parts of policies with one shared mask that moves: when, how many, drop, grow.

In an adjustment round, of the k_l weights that layer l keeps, the m_l = round(f_t · k_l) of smallest
magnitude are cut, and as many that were cut before come back, with the value 0:

    f_t = fraction / 2 · (1 + cos(π · t / T_stop)),   every `interval` rounds until T_stop = stop · rounds

Counts stay exact: a layer keeps as many weights as the budget says (or, with one global ranking, as many as
it began with).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from safari.bounds import at_least, positive_share, within
from safari.errors import ConfigError
from safari.models import Layout
from safari.pruning.budget import Budget, top_k
from safari.pruning.policy import Arrivals, FromGradient, MaskPolicy, MaskRound, Masks, State
from safari.pruning.scope import weight_entries


@dataclass(frozen=True)
class Pace:
    """Schedule of a mask's moves: the rounds, and the fraction of weights.

    Every `interval` rounds, `fraction` of the kept weights at first, decaying to 0 (a cosine) at the part
    `stop` of the run, after which masks rest.
    """

    interval: int
    fraction: float
    stop: float

    def __post_init__(self) -> None:
        at_least("interval", self.interval, 1)
        positive_share("fraction", self.fraction)
        within("stop", self.stop, 0, 1)

    def moves(self, t: int, rounds: int) -> bool:
        """Is round t (from 0) one in which the mask moves?

        >>> [t for t in range(50) if Pace(10, 0.3, 0.75).moves(t, 40)]
        [10, 20]
        """
        return t > 0 and t % self.interval == 0 and t < self.stop * rounds

    def part(self, t: int, rounds: int) -> float:
        """The fraction of the kept weights that moves in round t."""
        return self.fraction / 2 * (1 + math.cos(math.pi * t / (self.stop * rounds)))


def moved_counts(pace: Pace, mask: Tensor, layout: Layout, t: int, rounds: int) -> list[int]:
    """Number of weights of each layer that move in round t: never more than are free to come back."""
    part = pace.part(t, rounds)
    counts = zip(layer_counts(mask, layout), weight_entries(layout), strict=True)
    return [min(int(part * kept + 0.5), entry.size - kept) for kept, entry in counts]


def layer_counts(mask: Tensor, layout: Layout) -> list[int]:
    """Number of weights that a mask keeps in each prunable layer."""
    found: list[int] = torch.stack([mask[e.offset : e.end].sum() for e in weight_entries(layout)]).tolist()
    return found


def targets(budget: Budget, counts: Sequence[int]) -> list[int]:
    """Number of weights that each layer may keep in this round.

    The budget's own; with one ranking, `counts`, scaled down in proportion where they exceed the budget.
    """
    if budget.layers is not None:
        return list(budget.layers)
    if sum(counts) <= budget.total:
        return list(counts)
    wanted = [count * budget.total / sum(counts) for count in counts]
    floors = [int(w) for w in wanted]
    order = sorted(range(len(counts)), key=lambda i: (floors[i] - wanted[i], i))
    for i in order[: budget.total - sum(floors)]:
        floors[i] += 1
    return floors


def drop_and_grow(
    mask: Tensor,
    model: Tensor,
    layout: Layout,
    keep: Sequence[int],
    grow: Sequence[int],
    scores: Tensor | None,
) -> Tensor:
    """The mask in which layers keep their `keep` largest weights and gain the `grow` best of the cut ones.

    `scores` (over the whole vector) ranks what may come back; it is not looked at where nothing does. What is
    dropped in this call does not come back in it.

    >>> layout = Layout.of(torch.nn.Linear(5, 1, bias=False))
    >>> mask, model = torch.tensor([True, True, True, False, False]), torch.tensor([3.0, -1.0, 2.0, 0.0, 0.0])
    >>> drop_and_grow(mask, model, layout, [2], [1], torch.tensor([9.0, 9.0, 9.0, 1.0, 2.0])).tolist()
    [True, False, True, False, True]
    """
    out = mask.clone()
    for entry, stay, back in zip(weight_entries(layout), keep, grow, strict=True):
        here = slice(entry.offset, entry.end)
        was = mask[here]
        now = top_k(model[here].abs(), stay, among=was)
        if back:
            if scores is None:
                raise ValueError("growing needs scores")
            now = now | top_k(scores[here], back, among=~was)
        out[here] = now
    return out


@dataclass(frozen=True, eq=False)
class Steepest:
    """Clients' choice of what comes back: the `counts[l]` cut weights of layer l with the largest gradient.

    Called with gradients, a row a client, it gives bools likewise. It is data rather than a closure, so that a
    server can tell a client far away what to do: the mask, the layout and the counts say all.
    """

    mask: Tensor
    layout: Layout
    counts: Sequence[int]

    def __call__(self, gradient: Tensor) -> Tensor:
        """True where a weight should come back."""
        out = torch.zeros_like(gradient, dtype=torch.bool)
        for entry, count in zip(weight_entries(self.layout), self.counts, strict=True):
            here = slice(entry.offset, entry.end)
            size = torch.where(self.mask[here], -1.0, gradient[:, here].abs())
            # Stable, so that among equals the lower index is taken, on every device.
            order = torch.sort(size, dim=1, descending=True, stable=True).indices[:, :count]
            out[:, here] = torch.zeros_like(out[:, here]).scatter(1, order, True)
        return out


@dataclass(frozen=True, eq=False)
class GradientVotes:
    """Clients' reports: the gradient at the weights that `choose` chooses, 0 elsewhere."""

    choose: Steepest

    def __call__(self, gradient: Tensor) -> Tensor:
        """The votes, a row a client."""
        return torch.where(self.choose(gradient), gradient, 0.0)


@dataclass(frozen=True, eq=False)
class OwnMask:
    """A mask that each client moves by itself: in layer l the `counts[l]` smallest weights of `choose.mask` are cut,
    and those that `choose` chooses come back.
    """

    choose: Steepest
    model: Tensor

    @cached_property
    def rest(self) -> Tensor:
        """Part of the mask that stays, the same for every client."""
        mask, layout, counts = self.choose.mask, self.choose.layout, self.choose.counts
        stay = [kept - back for kept, back in zip(layer_counts(mask, layout), counts, strict=True)]
        return drop_and_grow(mask, self.model, layout, stay, [0] * len(stay), None)

    def __call__(self, gradient: Tensor) -> Tensor:
        """The masks, a row a client."""
        return self.rest | self.choose(gradient)


def votes_for(mask: Tensor, layout: Layout, counts: Sequence[int]) -> GradientVotes:
    """Clients' reports: the gradient at the `counts[l]` cut weights of layer l where it is largest."""
    return GradientVotes(Steepest(mask, layout, counts))


def next_votes(pace: Pace, mask: Tensor, round: MaskRound, breadth: float) -> FromGradient | None:
    """Votes that clients send in this round if the mask moves in the next; None if there are none to send.

    A vote is the gradient at `breadth` times as many weights as will come back.
    """
    t = round.number + 1
    if not breadth or not pace.moves(t, round.rounds):
        return None
    moved = moved_counts(pace, mask, round.layout, t, round.rounds)
    kept = layer_counts(mask, round.layout)
    room = [entry.size - k for entry, k in zip(weight_entries(round.layout), kept, strict=True)]
    return votes_for(mask, round.layout, [min(int(breadth * m), r) for m, r in zip(moved, room, strict=True)])


def first_mask(round: MaskRound, name: str) -> Tensor:
    """The mask that a policy begins with: by the configured score, on the untrained model."""
    if round.by_score is None:
        raise ConfigError(
            f"policy {name} has one mask for all clients, so pruning.pruner must be a score without data, "
            "such as rand, mag or synflow"
        )
    return round.by_score(None)


def regrowing(
    name: str,
    pace: Pace,
    scores: Callable[[State, MaskRound], Tensor | None],
    *,
    init: Callable[[Layout, torch.device], State] | None = None,
    learn: Callable[[State, Arrivals], State] | None = None,
    breadth: float = 0.0,
) -> MaskPolicy:
    """A policy whose shared mask moves at a pace.

    `scores(state, round)` ranks, over the whole vector, what may come back; None: nothing can in this round.
    `init` and `learn` are those of its own state. `breadth`: clients report their gradient before each move, at so
    many times the number of weights that will come back; 0: they report nothing.
    """

    def start(layout: Layout, device: torch.device) -> State:
        # An empty mask stands for "not chosen yet": the first round scores the model.
        empty = {"mask": torch.zeros(layout.size, dtype=torch.bool, device=device)}
        return empty | (init(layout, device) if init else {})

    def apply(state: State, round: MaskRound) -> tuple[Masks, State]:
        mask = state["mask"]
        if round.number == 0 or not bool(mask.any()):
            mask = first_mask(round, name)
        ranked = scores(state, round) if pace.moves(round.number, round.rounds) else None
        kept = layer_counts(mask, round.layout)
        goal = targets(round.budget, kept)
        back = [0] * len(kept)
        if ranked is not None:
            moved = moved_counts(pace, mask, round.layout, round.number, round.rounds)
            back = [min(m, g) for m, g in zip(moved, goal, strict=True)]
        stay = [min(k, g - b) for k, g, b in zip(kept, goal, back, strict=True)]
        if stay != kept:
            mask = drop_and_grow(mask, round.model, round.layout, stay, back, ranked)
        votes = next_votes(pace, mask, round, breadth)
        return Masks(shared=mask, votes=votes, announced=True), {**state, "mask": mask}

    votes = breadth > 0
    if learn is None:
        return MaskPolicy(start, apply, name=f"policy {name}", votes=votes)
    return MaskPolicy(start, apply, learn, name=f"policy {name}", votes=votes)
