"""Models that arrive in part: each block is aggregated with the clients whose block came.

A model travels in packets, each of which gives some of its coordinates. What came differs from client to
client, so that each coordinate k has a set S_k of clients that arrived for it, and there are few such sets.
For each of them the rule is asked as if it were a round of its own, in which S_k arrived and the others are
missing:

    x_next[k] = x[k] + Σ_{i in S_k} a_i(S_k) (x_i - x)[k] + Σ_j b_j(S_k) (z_j - x)[k]

So stand-ins are chosen block by block, and a model that is lost as a whole is the special case in which nothing of
it came. What the rule learns about clients, it learns once, from all that came: see `Phases`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safari.aggregation.checks import check_state, check_weights, decide
from safari.aggregation.compensation import Compensation, Decision, Round, State, combine, combine_blocks
from safari.aggregation.rule import own_columns, respond
from safari.errors import ConfigError

Ints = NDArray[np.int64]
# For each client, who stood in for it and for how many coordinates.
StandIns = Mapping[int, Mapping[int, int]]

# Numbers in a temporary: 64 MB in float32.
_AT_ONCE = 16_000_000


@dataclass(frozen=True)
class Block:
    """Coordinates for which the same clients arrived.

    Args:
        arrived: The rows of those clients, ascending.
        part: Where the coordinates are in the order that `arrange` gives.
    """

    arrived: Tensor
    part: slice


def aggregate(rule: Compensation, state: State, round: Round) -> tuple[Decision, Tensor, State]:
    """The rule's decision, the next model, and the rule's state, in which it does not yet remember the round.

    Where models arrived in part the decision is the one about clients from which nothing arrived at all, with the
    stand-ins of all blocks.
    """
    whole = _filled(round)
    learned = state if rule.phases is None else rule.phases.learn(state, whole)
    if round.came is None:
        decision, following = _decide(rule, learned, round)
        return decision, combine(round, decision, rule.name), following
    columns = _checked_columns(rule, learned)
    found = _at_once(rule, learned, columns, whole)
    model, spoke = _one_by_one(rule, learned, columns, round, round.came) if found is None else found
    decision, following = _decide(rule, learned, whole if rule.phases is None else replace(whole, came=None))
    names = {
        client: tuple(i for i, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])))
        for client, counts in sorted(spoke.items())
    }
    return replace(decision, stand_ins=names), model, following


def remembered(rule: Compensation, state: State, round: Round, in_place: bool) -> State:
    """The rule's next state, after what `aggregate` gave; `in_place`: it takes the memory over without a copy."""
    if rule.phases is None:
        return state
    state = state if in_place else own_columns(state, rule.columns)
    return check_state(rule.name, "remember", rule.phases.remember(state, _filled(round)))


def _filled(round: Round) -> Round:
    """The round as rules see it: of what did not come, the global model's numbers, and no mask."""
    if round.came is None:
        return round
    models = torch.where(round.came, round.models, round.global_model)
    return replace(round, models=models, masks=round.masks & round.came)


def _decide(rule: Compensation, state: State, round: Round) -> tuple[Decision, State]:
    if rule.phases is None:
        return decide(rule, state, round)
    return respond(rule.phases, state, round, rule.name), state


def _at_once(
    rule: Compensation, state: State, columns: State, round: Round
) -> tuple[Tensor, StandIns] | None:
    """The next model and who stood in for whom, with all blocks' weights at once; None where the rule cannot."""
    if rule.phases is None or rule.phases.weigh is None or round.came is None:
        return None
    model = torch.empty_like(round.global_model)
    cohort, arrived = round.cohort_ids, round.arrived_ids
    spoke = torch.zeros(len(cohort), len(arrived), dtype=torch.int64)
    for piece in pieces(round.came, len(cohort)):
        part = _part(round, round.came, piece.part)
        weights = rule.phases.weigh(
            state | {name: t[..., piece.part] for name, t in columns.items()}, part, piece.sets
        )
        if weights is None:
            return None
        check_weights(rule.name, weights, part, piece.sets)
        block = torch.from_numpy(piece.set_of).to(model.device)
        lengths = torch.from_numpy(piece.lengths).to(model.device)
        block = block.repeat_interleave(lengths, output_size=len(part.global_model))
        model[piece.part] = combine_blocks(part, weights, block, rule.name)
        if weights.stand_ins is not None:
            sizes = torch.zeros(len(piece.sets), dtype=torch.int64)
            sizes.index_add_(0, torch.from_numpy(piece.set_of), torch.from_numpy(piece.lengths))
            clients = slice(None) if weights.clients is None else weights.clients
            spoke[clients] += ((weights.stand_ins > 0) * sizes[:, None, None]).sum(0)
    counts = {
        client: {other: count for other, count in zip(arrived, row, strict=True) if count}
        for client, row in zip(cohort, spoke.tolist(), strict=True)
        if any(row)
    }
    return model, counts


def _one_by_one(
    rule: Compensation, state: State, columns: State, round: Round, came: Tensor
) -> tuple[Tensor, StandIns]:
    """The next model and who stood in for whom, from any rule: it is asked for each block."""
    order, blocks = arrange(came)
    arranged = _Arranged.of(round, columns, order)
    model = torch.empty_like(round.global_model)
    spoke: dict[int, Counter[int]] = {}
    for block in blocks:
        part = arranged.round(block)
        decision, _ = _decide(rule, state | arranged.state(block), part)
        at = order[block.part]
        model[at] = combine(part, decision, rule.name)
        for client, others in decision.stand_ins.items():
            spoke.setdefault(client, Counter()).update(dict.fromkeys(others, len(at)))
    return model, spoke


@dataclass(frozen=True)
class Piece:
    """A range of coordinates, and the sets of clients that arrived for them, on the host.

    Args:
        part: The coordinates.
        lengths: The coordinates in each run of neighbours with the same set.
        set_of: The set of each run.
        sets: `bool[sets, arrivals]`.
    """

    part: slice
    lengths: Ints
    set_of: Ints
    sets: Tensor


def pieces(came: Tensor, cohort: int) -> Iterator[Piece]:
    """All coordinates in pieces that are small enough for tensors of clients × coordinates.

    >>> (piece,) = pieces(torch.tensor([[True, True, False, True], [True, False, False, True]]), 2)
    >>> piece.lengths.tolist(), piece.set_of.tolist(), piece.sets.tolist()
    ([1, 1, 1, 1], [2, 1, 0, 2], [[False, False], [True, False], [True, True]])
    """
    clients, size = came.shape
    width, most = max(1, _AT_ONCE // max(clients, 1)), max(1, _AT_ONCE // max(clients * cohort, 1))
    # Packets cover runs of coordinates: few columns are enough to know them all.
    changes = (came[:, 1:] != came[:, :-1]).any(0)
    changes[width - 1 :: width] = True
    starts = torch.cat([changes.new_ones(1), changes]).nonzero()[:, 0]
    columns = came[:, starts].cpu().numpy()
    first = starts.cpu().numpy()
    ends = np.append(first[1:], size)
    at = 0
    while at < len(first):
        stop = int(np.searchsorted(ends, first[at] + width, "right"))
        stop = min(max(stop, at + 1), at + most)
        packed, set_of = np.unique(np.packbits(columns[:, at:stop], axis=0), axis=1, return_inverse=True)
        sets = np.unpackbits(packed, axis=0, count=clients).T.astype(np.bool_)
        lengths = ends[at:stop] - first[at:stop]
        part = slice(int(first[at]), int(ends[stop - 1]))
        yield Piece(part, lengths, set_of.reshape(-1), torch.from_numpy(sets))
        at = stop


def arrange(came: Tensor) -> tuple[Tensor, list[Block]]:
    """All coordinates, ordered by the clients that arrived for them, and ascending among equals.

    >>> order, blocks = arrange(torch.tensor([[True, True, False, True], [True, False, False, True]]))
    >>> [(block.arrived.tolist(), order[block.part].tolist()) for block in blocks]
    [([], [2]), ([0], [1]), ([0, 1], [0, 3])]
    """
    device, size = came.device, came.shape[1]
    changes = (came[:, 1:] != came[:, :-1]).any(0).nonzero().flatten() + 1
    starts = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), changes])
    # Packets cover runs of coordinates: few columns are enough to know them all.
    columns = came[:, starts].cpu().numpy()
    patterns, found = np.unique(np.packbits(columns, axis=0), axis=1, return_inverse=True)
    ends = torch.cat([starts[1:], torch.tensor([size], device=device)])
    pattern = torch.from_numpy(found.reshape(-1)).to(device).repeat_interleave(ends - starts)
    edges = np.cumsum([0, *torch.bincount(pattern, minlength=patterns.shape[1]).tolist()]).tolist()
    arrived = np.unpackbits(patterns, axis=0, count=len(came))
    rows = [torch.from_numpy(column.nonzero()[0]).to(device) for column in arrived.T]
    blocks = [Block(r, slice(a, b)) for r, (a, b) in zip(rows, pairwise(edges), strict=True)]
    return pattern.argsort(stable=True), blocks


@dataclass(frozen=True)
class _Arranged:
    """A round and the columns of a rule's state with the coordinates in order, so that a block is a slice."""

    whole: Round
    parameters: Tensor
    columns: State

    @classmethod
    def of(cls, round: Round, columns: State, order: Tensor) -> _Arranged:
        # An expanded view is one mask and stays one.
        one = round.masks.stride(0) == 0
        masks = round.masks[0, order].expand_as(round.masks) if one else round.masks[:, order]
        moved = replace(
            round, global_model=round.global_model[order], models=round.models[:, order], masks=masks
        )
        before = torch.cat([order.new_zeros(1), (order < round.parameters).cumsum(0)])
        return cls(moved, before.cpu(), {name: t[..., order] for name, t in columns.items()})

    def round(self, block: Block) -> Round:
        """A block as a round of its own."""
        whole, part = self.whole, block.part
        return Round(
            number=whole.number,
            global_model=whole.global_model[part],
            cohort=whole.cohort,
            arrived=whole.arrived[block.arrived],
            models=whole.models[:, part][block.arrived],
            masks=whole.masks[:, part][block.arrived],
            weights=whole.weights,
            same_mask=whole.same_mask,
            lr=whole.lr,
            parameters=int(self.parameters[part.stop] - self.parameters[part.start]),
        )

    def state(self, block: Block) -> State:
        """The columns of a block."""
        return {name: t[..., block.part] for name, t in self.columns.items()}


def _part(round: Round, came: Tensor, part: slice) -> Round:
    """A range of coordinates as a round of its own."""
    return replace(
        round,
        global_model=round.global_model[part],
        models=round.models[:, part],
        masks=round.masks[:, part],
        came=came[:, part],
        parameters=min(max(round.parameters - part.start, 0), part.stop - part.start),
    )


def _checked_columns(rule: Compensation, state: State) -> State:
    for name in rule.columns:
        if name not in state:
            raise ConfigError(f"{rule.name}: columns must name tensors of the state, got {name!r}")
    return {name: state[name] for name in rule.columns}
