"""BVR-L-SGD (Murata & Suzuki, ICML 2021): bias-variance reduced local steps.

v_0 = ḡ                                          the mean gradient that the server holds
v_k = g(w_k; ξ_k) - g(w_{k-1}; ξ_k) + v_{k-1}    the same mini-batch at two points
w_{k+1} = w_k - η v_k
"""

from __future__ import annotations

import torch
from torch import Tensor

from safari.training.algorithm import ClientAlgorithm, LocalRound, State
from safari.training.algorithms.memory import mean_of_last


def bvr_l_sgd() -> ClientAlgorithm:
    """BVR-L-SGD: steps follow a recursive estimate of the *global* gradient; each costs two gradients.

    In the paper the clients compute v_0 together before the local steps, on large batches. Here a client's
    gradient of its first mini-batch travels up with the model, and v_0 is the mean of those that the server
    last heard, so that a round stays one message each way; before anybody was heard v_0 is the client's own
    gradient. The paper goes on with the model of one worker, drawn at random; here the server's rule combines those
    of all. When an upload is lost the server goes on with the older gradient.
    """

    def direction(gradient: Tensor, local: LocalRound) -> tuple[Tensor, State]:
        if local.step == 0:
            mean = local.down["mean"]
            estimate, first = torch.where(mean.any(), mean, gradient), gradient
        else:
            before = local.gradient(local.state["last"])
            estimate = gradient - before + local.state["estimate"]
            first = local.state["first"]
        return estimate, {"first": first, "estimate": estimate, "last": local.model.clone()}

    def finish(local: LocalRound) -> tuple[State, State]:
        return {}, {"gradient": torch.where(local.mask, local.state["first"], 0.0)}

    server = mean_of_last("gradient", down="mean")
    return ClientAlgorithm(
        direction=direction, finish=finish, sends=lambda parameters: {"gradient": parameters}, server=server
    )
