"""Hold cuts back until every client has been heard.

Where masks differ between clients, a weight that all arrivals cut is 0 in their mean and stays 0: the few clients
that arrive in the first round would choose the support for everyone and for good, by scores on an untrained
model. So while a client that was asked is missing and has never been heard, such a weight keeps its value; after
that it is cut, unless some client kept it when last heard. With one mask for all there is nothing to wait for.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from safari.aggregation.compensation import Round, State, Weights, with_rest

# Nothing is held back from now on.
OVER = -1
# Numbers of the memory that are looked at at once: 16 MB.
_AT_ONCE = 16_000_000
# A remainder below this share of the missing weight is rounding.
_ROUNDING = 1e-6


def waits(state: State, round: Round) -> int:
    """The number of rounds after this one that may hold cuts back, or `OVER`; `state` is that of before the round."""
    left = int(state["wait"])
    if left == OVER or not len(round.arrived):
        return left
    return left - 1 if _waits_for_somebody(state, round, left) else OVER


def hold_back(weights: Weights, state: State, round: Round) -> Weights:
    """The weights of a round's arrivals with cuts held back, while there is anybody to wait for; in the round after
    that, what any client kept when it was last heard."""
    if not len(round.arrived):
        return weights
    spared = ~round.kept
    if not _waits_for_somebody(state, round, int(state["wait"])):
        spared &= _kept_by_others(state["kept"], round.arrived)
    return _sparing(weights, round, spared)


def _kept_by_others(kept: Tensor, arrived: Tensor) -> Tensor:
    """A bool for each number of the model: did any client but these keep it when it was last heard?"""
    others = kept.new_ones(len(kept)).index_fill(0, arrived, False).nonzero()[:, 0]
    found = torch.zeros_like(kept[0])
    for some in others.split(max(1, _AT_ONCE // kept.shape[1])):
        found |= kept[some].any(0)
    return found


def _waits_for_somebody(state: State, round: Round, left: int) -> bool:
    return (
        left > 0 and not round.same_mask and _differ(round) and bool((state["age"][round.missing] < 0).any())
    )


def _differ(round: Round) -> bool:
    """Do masks differ from client to client? With a single arrival we cannot tell, and assume so."""
    masks = round.masks
    return len(masks) == 1 or bool((masks[1:] != masks[0]).any())


def _sparing(weights: Weights, round: Round, spared: Tensor) -> Weights:
    """The weights with which missing clients leave these weights of the model unchanged."""
    x, own, missing = round.global_model, round.own, round.others.sum()
    stays = x * spared
    stays[round.parameters :] = 0
    # Without missing clients there is no weight to give to the old values.
    if not float(missing) > 0 or not bool(stays.any()):
        return weights
    shares = weights.a[0].to(own.device) - own
    spoken, total = shares.to(x) @ round.models, shares.sum()
    if weights.b is not None and weights.recalled is not None:
        b = weights.b[0].to(own.device)
        spoken, total = spoken + b.to(x) @ weights.recalled, total + b.sum()
    rest = float(missing - total)
    if rest > _ROUNDING * float(missing):
        # Missing clients without a stand-in stay at the global model, as in every rule.
        spoken, total = with_rest(spoken, round, rest), missing
    # `combine` multiplies by `total`; the arrivals are 0 wherever something is spared.
    recalled = ((spoken + stays) / total.to(x))[None]
    return replace(weights, a=own.cpu()[None], b=total.cpu()[None, None], recalled=recalled)
