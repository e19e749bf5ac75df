"""MimeLite with Adam's statistics (Karimireddy et al., "Breaking the centralized barrier for cross-device
federated learning", NeurIPS 2021): clients step with the server's momentum and scale, which stay fixed in a round.

    a step follows   ((1 - β) g + β m) / (√v + ε), each number clipped at ±clip
    the server       m ← (1 - β) ḡ + β m,   v ← β₂ v + (1 - β₂) ḡ²

ḡ is the mean gradient along the clients' steps. In the paper clients send it; here the server reads it off the step
that the weighted sum gave, which is linear in the gradients, so that nothing travels up beside the model:

    x - x_next = η ((1 - β) ḡ + β m) / (√v + ε)

A clipped number is read as a smaller gradient, and a weight that some clients cut and others keep moves towards 0
without one, which is read as a gradient, too. A weight that all arrivals cut has a step of 0, and its momentum is 0
after the round; one that arrived from nobody keeps its moments.

The server reads the scale off steps that were themselves divided by it. Where clients disagree, the mean gradient is
much smaller than their own: many numbers of their steps are clipped, the mean of those is read as a still smaller
gradient, and the second moments stay far too small. Most numbers of a client's step then have the same size, and steps
do not shrink as the training data are fitted; long runs may fall apart (results/tables.md, fedawe). A larger
`eps` helps. So does `scale = "clients"`, which takes the mean (without weights) of the arrivals' own squared gradients
instead of ḡ², read off their models in the same way: hardly anything is clipped then, and steps shrink with the
gradients. Where uploads are coded lossily (`wire.values`), the noise of the coding is squared, too, and the scale is
larger; long runs were measured with exact uploads only.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from safari.aggregation import Round
from safari.bounds import below, within
from safari.errors import ConfigError, one_of
from safari.training.algorithm import ClientAlgorithm, Scaled, ServerHalf, State
from safari.training.algorithms.fedlc import calibrated

Scale = Literal["mean", "clients"]

# Beyond this a gradient would have an infinite square, and what is infinite stays so.
_LARGEST = 1e18
# Of scale and bound: far beyond, they are 0 or infinite in float32.
_SIZES = (1e-30, 1e30)
# The largest β₂: float32 tells by how much it is below 1, to 3 %. From 0.99999998 on it would be 1, and
# moments 0/0.
_MOST_KEPT = 0.999999


def mime(
    *,
    momentum: float = 0.8,
    second: float = 0.99,
    eps: float = 1e-5,
    clip: float = 5.0,
    strength: float = 0.0,
    smoothing: float = 0.001,
    scale: Scale = "mean",
) -> ClientAlgorithm:
    """MimeLite: local steps of SGD with the server's momentum and the scale of its second moments.

    Adam at the client forgets everything between rounds; here the server remembers for all. Both vectors travel
    down with the model, so a client that missed rounds has the newest. Clients keep nothing, and the server learns
    from whatever step the rule for the missing gave, so a lost message changes nothing else. Needs
    `local.optimiser = "sgd"`; `lr` is the size of a whole round's step, and about ten times that of Adam's steps.

    `momentum`: β, the weight of the server's momentum in a step. `second`: β₂, what the second moments keep of the
    past. `eps`: smallest scale. `clip`: bound of each number of a step's direction, because the gradient of a single
    batch may be large where the mean gradient, and so the scale, is small. `strength` and `smoothing`: of the
    `calibrated` loss; with a strength of 0 the loss is the task's own. `scale`: whose gradients the second moments are
    taken of: the `mean` over clients, as in the paper, or the `clients`' own, which is safer in long runs with many
    clients whose data differ. Steps are then smaller at the same `lr`, the more so the less clients agree.
    """
    _check(momentum, second, {"eps": eps, "clip": clip}, scale)
    loss = calibrated(strength=strength, smoothing=smoothing) if strength else ClientAlgorithm()

    def init(clients: int, parameters: int, device: torch.device) -> State:
        zeros = torch.zeros(parameters, device=device)
        return {"momentum": zeros, "second": zeros.clone(), "rounds": torch.zeros((), device=device)}

    def down(state: State) -> State:
        # As in Adam: the moments begin at 0, and are too small by this factor.
        heard = 1 - second ** state["rounds"].clamp(min=1)
        return {"momentum": state["momentum"], "second": state["second"] / heard}

    def scaled(down: State) -> Scaled:
        return Scaled(1 - momentum, momentum * down["momentum"], down["second"].sqrt() + eps, clip)

    def apply(state: State, step: Tensor, up: State, round: Round) -> tuple[Tensor, State]:
        if round.lr <= 0:
            raise ConfigError(f"the client algorithm mime needs a learning rate above 0, got {round.lr}")
        size = down(state)["second"].sqrt() + eps

        def read(moved: Tensor) -> tuple[Tensor, Tensor]:
            mixed = _bounded(-moved / round.lr * size)
            return mixed, _bounded((mixed - momentum * state["momentum"]) / (1 - momentum))

        mixed, gradient = read(step)
        if scale == "mean":
            squares = gradient.square()
        else:
            moved, there = _moved(round)
            squares = _mean_square(read(moved)[1], there, state["second"])
        following = {
            "momentum": mixed,
            "second": second * state["second"] + (1 - second) * squares,
        }
        # Numbers that arrived from nobody have no step to read: their moments stay, as in a lost round.
        heard = {name: round.where_heard(new, state[name]) for name, new in following.items()}
        return step, {**heard, "rounds": state["rounds"] + 1}

    return ClientAlgorithm(
        loss=loss.loss,
        scaled=scaled,
        server=ServerHalf(init, down, apply),
        check=loss.check,
        counts_labels=loss.counts_labels,
        plain_steps=True,
    )


def _check(momentum: float, second: float, sizes: dict[str, float], scale: str) -> None:
    below("momentum", momentum, 1)
    within("second", second, 0, _MOST_KEPT)
    for name, value in sizes.items():
        within(name, value, *_SIZES)
    if scale not in get_args(Scale):
        raise ConfigError(one_of("scale", scale, get_args(Scale)))


def _moved(round: Round) -> tuple[Tensor, Tensor]:
    """Change of each parameter by each arrival, and True where it is known: kept, and received."""
    there = round.masks if round.came is None else round.masks & round.came
    return (round.models - round.global_model)[:, : round.parameters], there[:, : round.parameters]


def _mean_square(numbers: Tensor, there: Tensor, otherwise: Tensor) -> Tensor:
    """Means of the columns over the entries marked in `there`; `otherwise` where there are none."""
    count = there.sum(0)
    # Divided first: a sum of many squares may be infinite where their mean is not.
    mean = (numbers.square() / count.clamp(min=1)).masked_fill(~there, 0.0).sum(0)
    return torch.where(count > 0, mean, otherwise)


def _bounded(numbers: Tensor) -> Tensor:
    return numbers.clamp(-_LARGEST, _LARGEST)
