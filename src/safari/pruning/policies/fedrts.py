"""FedRTS: federated robust pruning by Thompson sampling (NeurIPS 2025): a memory of individual votes.

Every weight i has a belief Beta(α_i, β_i) that it belongs in the mask. In every round, of the kept weights,
an outcome

    X_i = (1 - γ) · [i among the κ largest of the mean] + γ · Σ_c p_c · [i among the κ largest of client c]

is counted, α_i ← α_i + λ·X_i, β_i ← β_i + λ·(1 - X_i), where κ of the K kept weights of a layer would stay in
a move. Before a move clients vote for the cut weights with the largest gradients, X_i = (1 - γ)/2 + γ · Σ_c
p_c · [c votes for i]. In a move a layer keeps the K weights with the largest draws from their beliefs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from safari.bounds import within
from safari.models import Layout
from safari.pruning.budget import top_k
from safari.pruning.policies.regrow import Pace, first_mask, layer_counts, moved_counts, next_votes, targets
from safari.pruning.policy import Arrivals, MaskPolicy, MaskRound, Masks, State
from safari.pruning.scope import weight_entries

# Beliefs are float32 and begin at 1: less would be rounded away, more would end at infinity.
_STRENGTHS = (1e-6, 1e6)


def fedrts(
    *,
    interval: int = 10,
    fraction: float = 0.4,
    stop: float = 0.6,
    gamma: float = 0.5,
    strength: float = 10.0,
    stand_ins: bool = True,
) -> MaskPolicy:
    """FedRTS: beliefs about every weight, fed by the clients' individual votes; masks are drawn from them.

    `gamma`: how much the clients' own votes count against the mean model's. `strength`: λ, how much a round's
    outcome counts. `stand_ins`: a client that stood in for others votes for them, too. `interval`, `fraction`
    and `stop` as in SET (a fraction of 0.4 starts with 0.4 and decays to 0: the authors' 0.2 · (1 + cos)).
    """
    pace = Pace(interval, fraction, stop)
    within("gamma", gamma, 0, 1)
    within("strength", strength, *_STRENGTHS)

    def init(layout: Layout, device: torch.device) -> State:
        ones = torch.ones(layout.size, device=device)
        mask = torch.zeros(layout.size, dtype=torch.bool, device=device)
        return {"mask": mask, "alpha": ones, "beta": ones.clone(), "voted": torch.full((1,), -1)}

    def learn(state: State, arrivals: Arrivals) -> State:
        t = arrivals.number + 1
        if t >= pace.stop * arrivals.rounds:
            return state
        shares = arrivals.weights if stand_ins else arrivals.own
        shares = (shares / shares.sum()).to(arrivals.model)
        moved = moved_counts(pace, state["mask"], arrivals.layout, t, arrivals.rounds)
        outcome = _outcome(state["mask"], arrivals, shares, moved, gamma)
        # Without votes nothing is learned about weights that are cut.
        seen = arrivals.layout.prunable.to(outcome.device)
        seen = seen & state["mask"] if arrivals.votes is None else seen
        return {
            "mask": state["mask"],
            "alpha": state["alpha"] + strength * torch.where(seen, outcome, 0.0),
            "beta": state["beta"] + strength * torch.where(seen, 1 - outcome, 0.0),
            "voted": torch.full((1,), -1 if arrivals.votes is None else arrivals.number),
        }

    def apply(state: State, round: MaskRound) -> tuple[Masks, State]:
        mask = state["mask"]
        if round.number == 0 or not bool(mask.any()):
            mask = first_mask(round, "fedrts")
        elif pace.moves(round.number, round.rounds) and int(state["voted"]) == round.number - 1:
            mask = _drawn(state, mask, round)
        votes = next_votes(pace, mask, round, 1.0)
        return Masks(shared=mask, votes=votes, announced=True), {**state, "mask": mask}

    return MaskPolicy(init, apply, learn, name="policy fedrts", votes=True)


def _outcome(mask: Tensor, arrivals: Arrivals, shares: Tensor, moved: list[int], gamma: float) -> Tensor:
    """X of every weight: of the kept ones by magnitude, of the others by votes."""
    outcome = torch.full_like(arrivals.model, 0.5)
    for entry, move in zip(weight_entries(arrivals.layout), moved, strict=True):
        here = slice(entry.offset, entry.end)
        kept = mask[here]
        core = int(kept.sum()) - move
        mean = top_k(arrivals.model[here].abs(), core, kept).to(shares)
        each = torch.stack([top_k(model[here].abs(), core, kept) for model in arrivals.models]).to(shares)
        found = (1 - gamma) * mean + gamma * (shares @ each)
        if arrivals.votes is not None:
            voted = shares @ (arrivals.votes[:, here] != 0).to(shares)
            found = torch.where(kept, found, (1 - gamma) / 2 + gamma * voted)
        outcome[here] = found
    return outcome


def _drawn(state: State, mask: Tensor, round: MaskRound) -> Tensor:
    """A mask of the largest draws, layer by layer."""
    alpha, beta = (state[name].double().cpu().numpy() for name in ("alpha", "beta"))
    draws = torch.from_numpy(round.rng.beta(alpha, beta)).to(round.model.device)
    out = mask.clone()
    goal = targets(round.budget, layer_counts(mask, round.layout))
    for entry, count in zip(weight_entries(round.layout), goal, strict=True):
        out[entry.offset : entry.end] = top_k(draws[entry.offset : entry.end], count)
    return out
