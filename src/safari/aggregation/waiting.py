"""Cuts that wait until everybody was heard.

Where masks differ from client to client, a weight that all arrivals cut is 0 in their mean, and stays 0: the
few who arrive in the first round would choose the weights for all and for ever, by a look at an untrained
model. So as long as somebody who was asked and is missing was never heard, such a weight keeps its value;
after that it is cut, unless somebody kept it when last heard. Masks that are the same for all have nothing to
wait for.
"""

from __future__ import annotations

from torch import Tensor

from safari.aggregation.compensation import Decision, Round, State, with_rest

# Cuts are as they come from now on.
OVER = -1
# A part of the missing below this is rounding.
_ROUNDING = 1e-6


def hold_back(decision: Decision, held: State, round: Round, left: int) -> tuple[Decision, int]:
    """A decision that cuts less, and how many rounds may still wait, or `OVER`.

    `held` is the memory after the round, `left` how many rounds may wait, this one included.
    """
    alive = round.kept
    if round.same_mask:
        return decision, OVER
    if left > 0 and _differ(round) and bool((held["age"][round.missing] < 0).any()):
        return _sparing(decision, round, ~alive), left - 1
    return _sparing(decision, round, ~alive & held["kept"].any(0)), OVER


def _differ(round: Round) -> bool:
    """Do masks differ from client to client? With a single arrival we cannot tell, and assume so."""
    masks = round.masks
    return len(masks) == 1 or bool((masks[1:] != masks[0]).any())


def _sparing(decision: Decision, round: Round, spared: Tensor) -> Decision:
    """The decision in which the missing keep these weights of the model as they are."""
    x, own, missing = round.global_model, round.weights[round.present], round.weights[~round.present].sum()
    stays = x * spared
    stays[round.parameters :] = 0
    # Where nobody is missing there is nobody who could keep anything.
    if not float(missing) > 0 or not bool(stays.any()):
        return decision
    shares = decision.a - own
    spoken, total = shares.to(x) @ round.models, shares.sum()
    if decision.b is not None and decision.recalled is not None:
        spoken, total = spoken + decision.b.to(x) @ decision.recalled, total + decision.b.sum()
    rest = float(missing - total)
    if rest > _ROUNDING * float(missing):
        # For some nobody speaks: as in every rule, they stay with the model.
        spoken, total = with_rest(spoken, round, rest), missing
    # In the sum this counts with `total`, and the arrivals have 0 where something stays.
    return Decision(own, total[None], ((spoken + stays) / total.to(x))[None], decision.stand_ins)
