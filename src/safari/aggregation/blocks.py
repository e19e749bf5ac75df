"""Models that arrive in part: each block is aggregated with the clients whose block came.

A model travels in packets, each of which gives some of its coordinates. What came differs from client to
client, so that each coordinate k has a set S_k of clients that arrived for it, and there are few such sets.
For each of them the rule is asked as if it were a round of its own, in which S_k arrived and the others are
missing:

    x_next[k] = x[k] + Σ_{i in S_k} a_i(S_k) (x_i - x)[k] + Σ_j b_j(S_k) (z_j - x)[k]

So stand-ins speak block by block, and a model that is lost as a whole is the special case in which nothing of
it came. What the rule learns about clients, it learns once, from all that came: see `Compensation.learn`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from safari.aggregation.checks import decide
from safari.aggregation.compensation import Compensation, Decision, Round, State, combine
from safari.errors import ConfigError


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
    """What the rule decides, the next model, and the rule's next state.

    Where models arrived in part the decision is the one about clients of whom nothing came at all, with the
    stand-ins of all blocks.
    """
    if round.came is None:
        decision, following = decide(rule, state, round)
        return decision, combine(round, decision, rule.name), following
    filled = torch.where(round.came, round.models, round.global_model)
    whole = replace(round, models=filled, masks=round.masks & round.came)
    learned = rule.learn(state, whole) if rule.learn is not None else state
    respond = replace(rule, apply=rule.respond or rule.apply)
    order, blocks = arrange(round.came)
    arranged = _Arranged.of(round, _checked_columns(rule, learned), order)
    model = torch.empty_like(round.global_model)
    stand_ins: dict[int, Counter[int]] = {}
    for block in blocks:
        part = arranged.round(block)
        decision, _ = decide(respond, learned | arranged.state(block), part)
        at = order[block.part]
        model[at] = combine(part, decision, rule.name)
        for client, others in decision.stand_ins.items():
            stand_ins.setdefault(client, Counter()).update(dict.fromkeys(others, len(at)))
    decision, following = decide(respond, learned, whole)
    names = {
        client: tuple(i for i, _ in sorted(spoke.items(), key=lambda item: (-item[1], item[0])))
        for client, spoke in sorted(stand_ins.items())
    }
    return replace(decision, stand_ins=names), model, following


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
            parameters=int(self.parameters[part.stop] - self.parameters[part.start]),
        )

    def state(self, block: Block) -> State:
        """The columns of a block."""
        return {name: t[..., block.part] for name, t in self.columns.items()}


def _checked_columns(rule: Compensation, state: State) -> State:
    for name in rule.columns:
        if name not in state:
            raise ConfigError(f"{rule.name}: columns must name tensors of the state, got {name!r}")
    return {name: state[name] for name in rule.columns}
