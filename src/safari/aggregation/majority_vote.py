"""The server's half of signSGD: each number of the model moves the way that most of the arrivals moved it."""

from __future__ import annotations

import torch
from torch import Tensor

from safari.aggregation.compensation import Compensation, Round, State
from safari.aggregation.rule import rule, share
from safari.bounds import above

# Shares sum to 1: a vote below this is rounding error, and counts as a tie.
_TIE = 1e-9


def majority_vote(*, lr: float = 1.0, relative: bool = True) -> Compensation:
    """signSGD with majority vote (2018): each number takes a step of one size, the way most arrivals moved it.

    Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018, and "signSGD with
    Majority Vote is Communication Efficient and Fault Tolerant", ICLR 2019. With Δ_i = x_i - x the change that
    arrival i made, and w_i its weight,

        x_next = x + η · sign(Σ_i w_i sign(Δ_i)),   η = lr · median_i mean_k |Δ_i[k]|   (relative)
                                                    η = lr                              (absolute)

    `lr`: the size of a step, above 0. `relative`: in units of the mean magnitude of a change, over the parameters
    that a client kept; of the arrivals' the (lower) median counts, so that nobody sets the step alone.

    The missing do not vote; nor does a client that cut a weight, or did not change it. A number stays as it is
    where the vote is tied, and is 0 where all arrivals cut it. Where parts of models arrive, each number is voted on
    by those whose number came, and the step is the same for all. Buffers are averaged. Uploads need no more than
    `wire.values = "sign"`, and any other values will do.
    """
    above("lr", lr, 0)

    def init(clients: int, size: int, device: torch.device) -> State:
        # The size of the latest step.
        return {"step": torch.zeros((), dtype=torch.float64, device=device)}

    def learn(state: State, round: Round) -> State:
        if not len(round.arrived):
            return state
        eta = _median_magnitude(round) * lr if relative else torch.full_like(state["step"], lr)
        return {"step": eta}

    def estimate(state: State, round: Round) -> Tensor:
        weights, x, part = share(round), round.global_model, slice(round.parameters)
        signs = (round.models[:, part] - x[part]).sign().masked_fill(~round.masks[:, part], 0.0)
        vote = weights @ signs.double()
        moved = x[part] + state["step"].to(x.dtype) * torch.where(vote.abs() > _TIE, vote.sign(), 0.0).to(
            x.dtype
        )
        buffers = weights.to(x.dtype) @ round.models[:, round.parameters :]
        return torch.cat([torch.where(round.kept[part], moved, 0.0), buffers])

    return rule(init=init, learn=learn, estimate=estimate)


def _median_magnitude(round: Round) -> Tensor:
    """The lower median over arrivals of the mean magnitude of what they changed, among what they kept."""
    part = slice(round.parameters)
    kept = round.masks[:, part]
    change = (round.models[:, part] - round.global_model[part]).abs().masked_fill(~kept, 0.0)
    each = change.sum(1, dtype=torch.float64) / kept.sum(1).clamp(min=1)
    return each.median()
