"""FedAWE (Xiang et al., NeurIPS 2024): adaptive weighting for clients that come and go, without known probabilities.

    a client that takes part in round t begins at x_i, the model that it got after it last took part (x⁰ before)
    it sends       w_i, its model after the local steps
    the server     x_next = mean of x_i + η · clip(mean of (t - τ_i) (w_i - x_i)), over the arrivals, which alone get it

τ_i is the round in which it last took part (-1 before): a client that was away for long echoes its update, and
going on from where it was keeps models of the missing in the mean ("implicit gossip"). The authors' public code clips
the mean step at a norm of 0.5, for this algorithm alone, and tests the mean of all clients' models x_i.
"""

from __future__ import annotations

import torch
from torch import Tensor

from safari.aggregation import Round
from safari.bounds import above, at_least
from safari.training.algorithm import ClientAlgorithm, ServerHalf, State
from safari.training.algorithms.memory import vector_each


def fedawe(*, lr: float = 1.0, clip: float = 0.0, mean: bool = False) -> ClientAlgorithm:
    """FedAWE: clients go on from the model they last took part with, and echo rounds in which they were away.

    `lr`: η, the authors' global learning rate. `clip`: the largest norm of the mean step, 0.5 in the authors' code
    (0: no bound). `mean`: the average that is tested and given away beside the newest model is the mean of all clients'
    models, as in the authors' code, and not the running average (`aggregation.average`). The server works out the mean
    of the arrivals itself, so it is meant for the rule `drop`: no rule for the missing has a say. "Took part" means
    that the upload arrived. The server keeps the model of each client and sends it, beside the broadcast, to those that
    missed rounds; their bytes count both.
    """
    above("lr", lr, 0)
    at_least("clip", clip, 0, finite=True)

    def begin(start: Tensor, state: State, down: State) -> Tensor:
        return torch.where(down["current"] > 0, start, down["held"])

    def init(clients: int, parameters: int, device: torch.device) -> State:
        held = vector_each(clients, parameters, device)
        ones = torch.ones(clients, 1, device=device)
        # At first everybody holds the broadcast; `held` is filled when that moves on.
        return {"held": held, "current": ones, "since": -ones}

    def down(state: State) -> State:
        return {"held": state["held"], "current": state["current"]}

    def apply(state: State, step: Tensor, up: State, round: Round) -> tuple[Tensor, State]:
        x = round.global_model[: round.parameters]
        held = torch.where(state["current"] > 0, x, state["held"])
        began = held[round.arrived].masked_fill(~round.masks[:, : round.parameters], 0.0)
        echo = round.number - state["since"][round.arrived]
        moved = echo * (round.models[:, : round.parameters] - began)
        share = round.weights[round.present].to(moved)
        if round.came is None:
            base, change = (share / share.sum() @ rows for rows in (began, moved))
        else:
            # Each number is the mean over those of whom it came; where nobody's did it stays.
            counts = share[:, None] * round.came[:, : round.parameters]
            total = counts.sum(0)
            base, change = ((counts * rows).sum(0) / total.clamp(min=1e-30) for rows in (began, moved))
            base = torch.where(total > 0, base, x)
        # Where nothing moved the norm is 0, and the share 1.
        share_kept = (clip / change.norm()).clamp(max=1.0) if clip else 1.0
        mean = base + lr * share_kept * change
        rows = round.arrived[:, None]
        since = state["since"].scatter(0, rows, float(round.number))
        current = torch.zeros_like(state["current"]).scatter(0, rows, 1.0)
        return mean - x, {"held": held, "current": current, "since": since}

    def everybody(state: State, model: Tensor) -> Tensor:
        return torch.where(state["current"] > 0, model, state["held"]).mean(0)

    half = ServerHalf(init, down, apply, everybody if mean else None)
    return ClientAlgorithm(begin=begin, server=half)
