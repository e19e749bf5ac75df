"""Early-Bird tickets (You et al., ICLR 2020): train densely, and cut once the mask has come to rest.

    m_t         the mask that the score would give on the dense global model of round t
    d(m, m')  = share of what one keeps that the other cuts
    cut by m_t  in the first round t with  max_{s < window} d(m_t, m_{t-s}) ≤ tolerance

The paper counts the weights in which two masks differ over all there are; at the half of the channels that it cuts by
default this is the same, but where 95% are cut, no two masks would be further apart than its tolerance. It cuts
channels, by the scales of batch norm; here weights are cut, by any score.

Until then nothing is cut, and uploads are dense; from then on the mask stays. It is the one policy that keeps more
than the round's budget, which it applies later; a policy of your own may not.
"""

from __future__ import annotations

import torch

from safari.bounds import below, within
from safari.models import Layout
from safari.pruning.policies.regrow import first_mask
from safari.pruning.policy import MaskPolicy, MaskRound, Masks, State


def early_bird(*, tolerance: float = 0.1, window: int = 5, latest: float = 0.5) -> MaskPolicy:
    """Early-Bird: nothing is cut until the mask that would be cut has rested for `window` rounds.

    `tolerance`: the largest share of the weights kept in which two of these masks may differ. `latest`: the part of
    the run at which the cut is made in any case. It wants a score that changes with the model, such as mag or synflow.
    """
    below("tolerance", tolerance, 1)
    within("window", window, 2, 100)
    within("latest", latest, 0, 1)

    def init(layout: Layout, device: torch.device) -> State:
        nothing = torch.zeros(layout.size, dtype=torch.bool, device=device)
        # `seen` counts the masks in `last`; an empty `mask` means that nothing is cut yet.
        return {
            "mask": nothing,
            "last": nothing.repeat(window - 1, 1),
            "seen": torch.zeros(1, dtype=torch.int64),
        }

    def apply(state: State, round: MaskRound) -> tuple[Masks, State]:
        if bool(state["mask"].any()):
            return Masks(shared=state["mask"], announced=True), state
        found, seen = first_mask(round, "early-bird"), int(state["seen"])
        kept = found & round.prunable
        apart = (kept & ~state["last"]).sum(1) / kept.sum().clamp(min=1)
        rests = seen >= window - 1 and bool((apart <= tolerance).all())
        if rests or round.number >= latest * round.rounds:
            return Masks(shared=found, announced=True), {**state, "mask": found}
        last = state["last"].clone()
        last[seen % (window - 1)] = found
        everything = torch.ones_like(found)
        after = {"mask": state["mask"], "last": last, "seen": state["seen"] + 1}
        return Masks(shared=everything, announced=True), after

    return MaskPolicy(init, apply, name="policy early-bird")
