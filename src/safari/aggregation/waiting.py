"""Hold cuts back until every client has been heard.

Where masks differ between clients, a weight that all arrivals cut is 0 in their mean and stays 0: the few clients
that arrive in the first round would choose the support for everyone and for good, by scores on an untrained
model. So while a client that was asked is missing and has never been heard, such a weight keeps its value; after
that it is cut, unless some client kept it when last heard. With one mask for all there is nothing to wait for.
"""

from __future__ import annotations

from torch import Tensor

from safari.aggregation.compensation import Decision, Round, State, with_rest

# Nothing is held back from now on.
OVER = -1
# A remainder below this share of the missing weight is rounding.
_ROUNDING = 1e-6


def hold_back(decision: Decision, held: State, round: Round, left: int) -> tuple[Decision, int]:
    """The decision with cuts held back, and how many more rounds may do so, or `OVER`.

    `held` is the memory after the round; `left` is how many rounds may still hold back, this one included.
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
    """The decision in which missing clients leave these weights of the model unchanged."""
    x, own, missing = round.global_model, round.own, round.others.sum()
    stays = x * spared
    stays[round.parameters :] = 0
    # Without missing clients there is no weight to give to the old values.
    if not float(missing) > 0 or not bool(stays.any()):
        return decision
    shares = decision.a - own
    spoken, total = shares.to(x) @ round.models, shares.sum()
    if decision.b is not None and decision.recalled is not None:
        spoken, total = spoken + decision.b.to(x) @ decision.recalled, total + decision.b.sum()
    rest = float(missing - total)
    if rest > _ROUNDING * float(missing):
        # Missing clients without a stand-in stay at the global model, as in every rule.
        spoken, total = with_rest(spoken, round, rest), missing
    # `combine` multiplies by `total`; the arrivals are 0 wherever something is spared.
    return Decision(own, total[None], ((spoken + stays) / total.to(x))[None], decision.stand_ins)
