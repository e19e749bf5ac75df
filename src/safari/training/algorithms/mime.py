"""MimeLite with Adam's statistics (Karimireddy et al., "Breaking the centralized barrier for cross-device
federated learning", NeurIPS 2021): clients step with the server's momentum and scale, which stay fixed in a round.

With the momentum m, the second moments v, s = √v + ε, and η/τ the rate of each of a client's τ steps:

    a step     x_i ← x_i - η/τ clip((1 - β) g / s + p),   p = β m / s
    is sent    u_i = (x_i - x) / η + p, as the model x + u_i; unless clipped, the mean of -(1 - β) g / s
    the sum    u = what the rule for the missing makes of the u_i;   ḡ = -u s / (1 - β)
    a round    x ← x + η (u - p),   m ← (1 - β) ḡ + β m,   v ← β₂ v + (1 - β₂) ḡ²

Where the rule's weights sum to 1, x becomes the mean of the clients' models, as in the paper; but of its movement a
client sends its own part alone, and free of the rate. The common part, -η p, is known to the server. Sent along,
it makes all updates look alike, so that nothing can be learned about which clients are; a rule that remembers updates
repeats past momentum; and a coarse upload spends its bits on it. What is left of coarse uploads for later ones
(`wire.feedback`), and what a rule remembers, keep their size while η falls. In the paper clients send gradients beside
their models; here the server reads them off u, so that nothing travels beside a model.

When uploads are lost, each weight does one of three things:

- Something of it came: it moves by momentum and by what came.
- Nothing of it came, because of lost packets or because nobody arrived: it stays, and so do its moments. They describe
  rounds with arrivals; momentum alone would carry the model on through an outage without any gradient.
- All arrivals cut it: it becomes what the rule says, and its momentum is 0. There is no gradient, so its second moment
  stays.

A weight that a share q of the arrivals keep, and the others cut, moves by q of its step, and by 1 - q of the way to 0;
ḡ is the mean gradient of those that keep it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from safari.aggregation import Round
from safari.errors import ConfigError
from safari.training.algorithm import ClientAlgorithm, LocalRound, ServerHalf, State
from safari.training.algorithms.fedlc import calibrated

# Beyond this a gradient would have an infinite square, and what is infinite stays so.
_LARGEST = 1e18
# In place of 0 where a share is divided by.
_LEAST_SHARE = 1e-9


def mime(
    *,
    momentum: float = 0.8,
    second: float = 0.99,
    eps: float = 1e-5,
    clip: float = 5.0,
    strength: float = 0.0,
    smoothing: float = 0.001,
) -> ClientAlgorithm:
    """MimeLite: local steps of SGD with the server's momentum and the scale of its second moments.

    Adam at the client forgets everything between rounds; here the server remembers for all. Both vectors travel
    down with the model, so a client that missed rounds has the newest. A client sends its own part of its movement,
    without that of the momentum, which the server adds again; rules for the missing and coarse uploads see nothing
    else. Clients keep nothing, and the server learns from whatever the rule for the missing made of the uploads, so a
    lost message changes nothing else. Needs `local.optimiser = "sgd"`; `lr` is the size of a whole round's step, and
    about ten times that of Adam's steps.

    `momentum`: β, the weight of the server's momentum in a step. `second`: β₂, what the second moments keep of the
    past. `eps`: smallest scale. `clip`: bound of each number of a step's direction, because the gradient of a single
    batch may be large where the mean gradient, and so the scale, is small. `strength` and `smoothing`: of the
    `calibrated` loss; with a strength of 0 the loss is the task's own.
    """
    for name, value in (("momentum", momentum), ("second", second)):
        if not 0 <= value < 1:
            raise ConfigError(f"{name} must be at least 0 and below 1, got {value}")
    for name, value in (("eps", eps), ("clip", clip)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name} must be above 0, got {value}")
    loss = calibrated(strength=strength, smoothing=smoothing) if strength else ClientAlgorithm()

    def init(clients: int, parameters: int, device: torch.device) -> State:
        zeros = torch.zeros(parameters, device=device)
        return {"momentum": zeros, "second": zeros.clone(), "rounds": torch.zeros((), device=device)}

    def down(state: State) -> State:
        # As in Adam: the second moments begin at 0, and are too small by this factor.
        heard = 1 - second ** state["rounds"].clamp(min=1)
        scale = (state["second"] / heard).sqrt() + eps
        return {"push": momentum * state["momentum"] / scale, "scale": scale}

    def direction(gradient: Tensor, local: LocalRound) -> tuple[Tensor, State]:
        mixed = (1 - momentum) * gradient / local.down["scale"] + local.down["push"]
        return mixed.clamp(-clip, clip), local.state

    def send(local: LocalRound) -> Tensor:
        # Each step takes an equal part of the rate: a round without steps has no common part.
        done = local.step / max(1, local.steps)
        return local.start + (local.model - local.start) / local.lr + done * local.down["push"]

    def apply(state: State, step: Tensor, up: State, round: Round) -> tuple[Tensor, State]:
        if round.lr <= 0:
            raise ConfigError(f"the client algorithm mime needs a learning rate above 0, got {round.lr}")
        size, common = len(step), down(state)
        cut = _share_that_cuts(round)[:size]
        to_zero = cut * round.global_model[:size]
        own = step + to_zero
        share = (1 - momentum) * (1 - cut).clamp(min=_LEAST_SHARE)
        gradient = _bounded(-own / share * common["scale"])
        kept = cut < 1
        moments = {
            "momentum": torch.where(kept, momentum * state["momentum"] + (1 - momentum) * gradient, 0.0),
            "second": torch.where(
                kept, second * state["second"] + (1 - second) * gradient.square(), state["second"]
            ),
        }
        if round.came is not None:
            came = round.came.any(0)[:size]
            moments = {name: torch.where(came, new, state[name]) for name, new in moments.items()}
        step = round.lr * (own - (1 - cut) * common["push"]) - to_zero
        return step, {**moments, "rounds": state["rounds"] + 1}

    return ClientAlgorithm(
        loss=loss.loss,
        direction=direction,
        send=send,
        server=ServerHalf(init, down, apply),
        check=loss.check,
        counts_labels=loss.counts_labels,
        plain_steps=True,
    )


def _share_that_cuts(round: Round) -> Tensor:
    """For each number of the model: the share of the arrivals, of those of which it came, that cut it."""
    if round.came is None and round.masks.stride(0) == 0:
        # An expanded view is one mask.
        return (~round.masks[0]).to(round.models.dtype)
    weights = round.own.to(round.models.dtype)
    cut = ~round.masks if round.came is None else round.came & ~round.masks
    heard = weights.sum() if round.came is None else weights @ round.came.to(weights)
    return (weights @ cut.to(weights)) / heard.clamp(min=_LEAST_SHARE)


def _bounded(numbers: Tensor) -> Tensor:
    return numbers.clamp(-_LARGEST, _LARGEST)
