"""The paper's masks: scored on the global model in every round; what was cut stays cut."""

from __future__ import annotations

from safari.pruning.policy import MaskPolicy, MaskRound, Masks, State


def static() -> MaskPolicy:
    """The paper: the score decides within what is left of the model; nothing that was cut comes back.

    A weight that every client cut is 0 in their mean. Once the support is within the budget it *is* the mask:
    with one mask for all (rand, mag, synflow) that is so from the second round on, unless a schedule cuts
    further.
    """

    def apply(state: State, round: MaskRound) -> tuple[Masks, State]:
        # The one line that freezes the masks: after the first round, what is 0 stays cut.
        support = None if round.number == 0 else round.model != 0
        if round.by_score is None:
            return Masks(support=support), state
        return Masks(shared=round.by_score(support)), state

    return MaskPolicy(lambda layout, device: {}, apply)
