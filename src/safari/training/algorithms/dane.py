"""Inexact DANE with stale gradients (Shamir et al., ICML 2014; FedDANE: Li et al., 2019).

    a step follows   g - g_i(x) + ḡ + μ (w - x)

g_i(x) is the client's own gradient at the global model, ḡ the mean of these over the clients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from safari.bounds import at_least
from safari.training.algorithm import ClientAlgorithm, LocalRound, State
from safari.training.algorithms.memory import mean_of_last


def dane(*, mu: float = 0.01) -> ClientAlgorithm:
    """Inexact DANE: each client's local problem is shifted so that its gradient at x is the mean gradient.

    DANE asks every client for its gradient before the local steps, which doubles the messages of a round.
    Here, as in FedDANE, a client's gradient is that of its first mini-batch, it travels up with the model,
    and ḡ is the mean of those that the server last heard (0 for a client never heard). When an upload is lost
    the server goes on with the older gradient. `mu`: the strength of the pull towards x.
    """
    at_least("mu", mu, 0, finite=True)

    def direction(gradient: Tensor, local: LocalRound) -> tuple[Tensor, State]:
        first = gradient if local.step == 0 else local.state["first"]
        pull = mu * (local.model - local.start)
        return gradient - first + local.down["mean"] + pull, {"first": first}

    def finish(local: LocalRound) -> tuple[State, State]:
        return {}, {"gradient": torch.where(local.mask, local.state["first"], 0.0)}

    server = mean_of_last("gradient", down="mean")
    return ClientAlgorithm(
        direction=direction, finish=finish, sends=lambda parameters: {"gradient": parameters}, server=server
    )
