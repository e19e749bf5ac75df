"""SCAFFOLD (Karimireddy et al., ICML 2020): control variates correct the drift of local steps.

    a step follows   g - c_i + c
    after the round  c_i ← mean of the gradients g along the local steps
    the server       c = (1/m) Σ_i c_i

With SGD the mean of the gradients is the paper's option II, c_i - c + (x - w) / (τ η), written so that it
also holds for Adam, whose steps are not gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from safari.errors import ConfigError, one_of
from safari.training.algorithm import ClientAlgorithm, LocalRound, ServerHalf, State
from safari.training.algorithms.memory import mean_of_arrived, mean_of_last, mean_with_stand_ins, vector_each

MEMORIES: dict[str, Callable[[str, str], ServerHalf]] = {
    "last": mean_of_last,
    "stand-in": mean_with_stand_ins,
    "arrived": mean_of_arrived,
}


def scaffold(*, memory: str = "last") -> ClientAlgorithm:
    """SCAFFOLD: steps are corrected by control variates c - c_i; one vector travels each way with the model.

    When an upload is lost, the client keeps its new variate and the server the one it heard last. The variate
    is sent as it is and not as a change, so both agree again when the client is next heard. By default c is
    always the mean of the variates that the server holds (0 for a client that it has never heard).

    `memory`: which variate of a client whose upload was lost is in c. `last`: the one last heard. `stand-in`: the
    mean of those of the clients that the rule lets stand in for it, the one last heard where it names none.
    `arrived`: none; c is the mean over the round's arrivals, and the server keeps no vector for every client.
    """
    if memory not in MEMORIES:
        raise ConfigError(one_of("memory", memory, MEMORIES))

    def init(clients: int, parameters: int, device: torch.device) -> State:
        return {"variate": vector_each(clients, parameters, device)}

    def direction(gradient: Tensor, local: LocalRound) -> tuple[Tensor, State]:
        total = gradient if local.step == 0 else local.state["sum"] + gradient
        corrected = gradient - local.state["variate"] + local.down["variate"]
        return corrected, {**local.state, "sum": total}

    def finish(local: LocalRound) -> tuple[State, State]:
        # Inside the mask: the gradient of a weight that is cut says nothing about its training.
        variate = torch.where(local.mask, local.state["sum"] / local.steps, 0.0)
        return {"variate": variate}, {"variate": variate}

    server = MEMORIES[memory]("variate", "variate")
    return ClientAlgorithm(
        init=init,
        direction=direction,
        finish=finish,
        sends=lambda parameters: {"variate": parameters},
        server=server,
    )
