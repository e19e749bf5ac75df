"""FedDST (Bibikar et al., AAAI 2022): clients decide which weights come back, the server cuts to size."""

from __future__ import annotations

import torch

from safari.models import Layout
from safari.pruning.policies.regrow import (
    OwnMask,
    Pace,
    Steepest,
    drop_and_grow,
    first_mask,
    layer_counts,
    moved_counts,
    targets,
)
from safari.pruning.policy import FromGradient, MaskPolicy, MaskRound, Masks, State


def feddst(*, interval: int = 10, fraction: float = 0.3, stop: float = 0.75) -> MaskPolicy:
    """FedDST: each client moves the mask by its own gradient; the server keeps the largest of the mean.

    In an adjustment round client i cuts the smallest weights of the global model and brings back those where
    its own gradient is largest: M_i. It trains inside M_i, so that what came back is trained before it is
    judged. In the round after, the server cuts the mean back to the budget by magnitude. Options as in SET.
    """
    pace = Pace(interval, fraction, stop)

    def init(layout: Layout, device: torch.device) -> State:
        return {"mask": torch.zeros(layout.size, dtype=torch.bool, device=device), "open": torch.zeros(1)}

    def apply(state: State, round: MaskRound) -> tuple[Masks, State]:
        mask = state["mask"]
        if round.number == 0 or not bool(mask.any()):
            mask = first_mask(round, "feddst")
        kept = layer_counts(mask, round.layout)
        goal = targets(round.budget, kept)
        if bool(state["open"]):
            # What clients brought back stands in the mean beside what they kept; the largest stay. A weight
            # that is 0 in the mean was kept by nobody, unless the last round was lost: then the old mask
            # fills the count.
            ranked = round.model.abs() + torch.finfo(torch.float32).tiny * mask
            mask = drop_and_grow(round.prunable | mask, ranked, round.layout, goal, [0] * len(goal), None)
        elif goal != kept:
            mask = drop_and_grow(mask, round.model, round.layout, goal, [0] * len(goal), None)
        own: FromGradient | None = None
        moves = pace.moves(round.number, round.rounds)
        if moves:
            back = moved_counts(pace, mask, round.layout, round.number, round.rounds)
            own = OwnMask(Steepest(mask, round.layout, back), round.model)
        after = {"mask": mask, "open": torch.full_like(state["open"], float(moves))}
        return Masks(shared=None if moves else mask, support=mask, own=own, announced=True), after

    return MaskPolicy(init, apply, name="policy feddst")
