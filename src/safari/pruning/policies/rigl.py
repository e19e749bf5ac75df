"""RigL: rigging the lottery (Evci et al., ICML 2020), with the gradients of the clients that arrived.

score of a cut weight = |Σ_i a_i g_i|
"""

from __future__ import annotations

import torch
from torch import Tensor

from safari.bounds import within
from safari.models import Layout
from safari.pruning.policies.regrow import Pace, regrowing
from safari.pruning.policy import Arrivals, MaskPolicy, MaskRound, State


def rigl(
    *,
    interval: int = 10,
    fraction: float = 0.3,
    stop: float = 0.75,
    breadth: float = 2.0,
    stand_ins: bool = True,
) -> MaskPolicy:
    """RigL: the smallest weights are cut, and those with the largest mean gradient come back.

    In the round before a move, clients report their gradient at `breadth` times as many weights as will come
    back. `stand_ins`: a client that stood in for others speaks for them here, too. `interval`, `fraction` and
    `stop` as in SET. Where no report arrived, the mask does not move.
    """
    return by_gradient("rigl", Pace(interval, fraction, stop), breadth, beta=0.0, stand_ins=stand_ins)


def by_gradient(name: str, pace: Pace, breadth: float, *, beta: float, stand_ins: bool) -> MaskPolicy:
    """Growth by a running mean of the reported gradients, of which `beta` is left at each move."""
    within("breadth", breadth, 1, 100)

    def init(layout: Layout, device: torch.device) -> State:
        return {"gradient": torch.zeros(layout.size, device=device), "reported": torch.full((1,), -1)}

    def learn(state: State, arrivals: Arrivals) -> State:
        if arrivals.votes is None:
            return state
        weights = arrivals.weights if stand_ins else arrivals.own
        mean = weights.to(arrivals.votes) @ arrivals.votes
        gradient = torch.lerp(mean, state["gradient"], beta)
        return {**state, "gradient": gradient, "reported": torch.full((1,), arrivals.number)}

    def scores(state: State, round: MaskRound) -> Tensor | None:
        # Only what was reported in the round before: the gradient of an older model is a different one.
        return state["gradient"].abs() if int(state["reported"]) == round.number - 1 else None

    return regrowing(name, pace, scores, init=init, learn=learn, breadth=breadth)
