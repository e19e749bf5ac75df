"""SET: sparse evolutionary training (Mocanu et al., Nature Communications 2018)."""

from __future__ import annotations

import torch
from torch import Tensor

from safari.pruning.policies.regrow import Pace, regrowing
from safari.pruning.policy import MaskPolicy, MaskRound, State


def set_(*, interval: int = 10, fraction: float = 0.3, stop: float = 0.75) -> MaskPolicy:
    """SET: the smallest weights are cut and as many come back at random; nothing has to be reported.

    `interval`: rounds between two moves. `fraction`: the part of the kept weights that moves at first, decaying
    to 0. `stop`: the part of the run after which the mask rests.
    """

    def scores(state: State, round: MaskRound) -> Tensor:
        return torch.from_numpy(round.rng.random(round.layout.size)).to(round.model.device)

    return regrowing("set", Pace(interval, fraction, stop), scores)
