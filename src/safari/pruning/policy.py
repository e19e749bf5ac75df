"""Mask policies choose the weights to train in each round: pairs of pure functions run by the server.

A policy is told, at the start of a round, the global model and how many weights may be kept (the budget, from
sparsity, scope and schedule). It answers with the round's masks:

- one mask for all, or
- a rule by which each client finds its own, from its own data (SNIP, GraSP; FedDST), and
- what clients should report beside their model, if anything (votes for weights to grow).

Both rules are functions of stacked tensors, a row a client, so that one client on a device runs the same
lines as a hundred in a simulation. A report travels with the upload and is lost with it: the policy
learns from the clients that arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from safari.models import Layout
from safari.pruning.budget import Budget

State = dict[str, Tensor]
# (dense gradients of the loss at the masked global model, a row a client) -> masks or votes, a row a client.
FromGradient = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class MaskRound:
    """All that a policy knows at the start of a round.

    `number` counts from 0; `rounds` is how many the run has. `model` is the global model; `budget` says how many
    weights may be kept in this round; `rng` is fresh in every round. `by_score(support)` is the mask that the
    configured score gives within a support (None: everywhere); it is None itself where the score looks at a
    client's data.
    """

    number: int
    rounds: int
    model: Tensor
    layout: Layout
    budget: Budget
    rng: np.random.Generator
    by_score: Callable[[Tensor | None], Tensor] | None

    @property
    def prunable(self) -> Tensor:
        """True where the vector holds prunable weights, on the model's device."""
        return self.layout.prunable.to(self.model.device)


@dataclass(frozen=True)
class Arrivals:
    """Arrivals of a round, after the server has averaged them.

    `number` and `rounds` as in `MaskRound`; `model` is the new global model. `models` are the arrivals' models, a
    row each, and `votes` what they reported beside them (`float32[arrived, size]`, 0 where a client did not
    vote; None where nobody was asked). `weights` (`float64[arrived]`) are the arrivals' shares in the weighted
    sum, those of the clients they stood in for included; `own` are their shares without these.
    """

    number: int
    rounds: int
    model: Tensor
    layout: Layout
    models: Tensor
    weights: Tensor
    own: Tensor
    votes: Tensor | None = None


@dataclass(frozen=True)
class Masks:
    """A policy's answer for a round.

    `shared` is the mask of every client; None where each finds its own: by `own` from the gradient on its
    data, or, where that is None too, by the configured score within `support`. `votes` makes a client's
    report from its gradient. `announced`: the mask cannot be worked out from the model alone, so it travels
    with the broadcast.
    """

    shared: Tensor | None = None
    support: Tensor | None = None
    own: FromGradient | None = None
    votes: FromGradient | None = None
    announced: bool = False

    @property
    def base(self) -> Tensor | None:
        """The mask under which gradients are taken: what all clients hold of the global model."""
        return self.shared if self.shared is not None else self.support

    @property
    def needs_gradient(self) -> bool:
        """Does a client have to look at the dense gradient in this round?"""
        return self.own is not None or self.votes is not None


def _unchanged(state: State, arrivals: Arrivals) -> State:
    return state


@dataclass(frozen=True)
class MaskPolicy:
    """`init(layout, device) -> state`; `apply(state, round) -> (masks, state)` at the start of a round;
    `learn(state, arrivals) -> state` at its end, unless nobody arrived.

    The state is a dict of tensors, which checkpoints can hold. Tensors may change their shape, go and come; after a
    resume one that `init` does not give is on the device that computes. `name` is what messages about the policy
    begin with. `votes`: its `Masks` have votes in some rounds; what cannot go together with these is then refused
    before the run, and not in the first such round.
    """

    init: Callable[[Layout, torch.device], State]
    apply: Callable[[State, MaskRound], tuple[Masks, State]]
    learn: Callable[[State, Arrivals], State] = _unchanged
    name: str = "the policy"
    votes: bool = False
