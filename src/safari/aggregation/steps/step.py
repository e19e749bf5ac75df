"""Server steps (server optimizers): each is a pair of pure functions, and they can be chained.

The weighted sum over the arrivals (`combine`) says how far the parameters should move. A server step takes
that change and returns another one: scaled, with momentum, scaled coordinate by coordinate. Steps are chained
as optax chains gradient transformations: each is given what the one before returned.

What holds for every step, whatever it returns:

- Only parameters step. Buffers are statistics: they are the weighted mean.
- Only what is kept steps. A number that no arrival kept is as the weighted sum has it: exactly 0 for a mean
  of the arrivals. The step is 0 there, and a step that keeps a memory forgets it there (`Round.kept`), so
  that a weight that comes back starts anew.
- A round without an update (nobody arrived, nothing was recalled) does not reach `apply`: the model and the
  state stay as they are. Where models arrive in part, that holds for a number that came from nobody: it is as
  the weighted sum has it, its step is 0, and a step that keeps a memory keeps it there (`Round.where_heard`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from safari.aggregation.checks import check_state
from safari.aggregation.compensation import NotFiniteError, Round, State
from safari.contracts import describe, pair
from safari.errors import ConfigError


def _unchanged(state: State, model: Tensor, round: Round) -> State:
    return state


@dataclass(frozen=True)
class ServerStep:
    """`init(model) -> state`; `apply(state, step, round) -> (step, state)`.

    `init`: the state before the first round, named tensors; `model` is the first global model.
    `apply`: `step` is the change of the parameters that the weighted sum gave, a vector as long as the model,
    0 for buffers and for what no arrival kept; `round` is what the server knows of the round.
    `observe(state, model, round) -> state` is told the finished model at the end of every round, also of one
    in which nobody arrived: for what is kept beside training, such as a running average.
    `name` is what messages about the step begin with.

    >>> half = ServerStep(init=lambda model: {}, apply=lambda state, step, round: (0.5 * step, state))
    """

    init: Callable[[Tensor], State]
    apply: Callable[[State, Tensor, Round], tuple[Tensor, State]]
    observe: Callable[[State, Tensor, Round], State] = _unchanged
    name: str = "the step"


UNCHANGED = ServerStep(init=lambda model: {}, apply=lambda state, step, round: (step, state))


def chain(*links: ServerStep) -> ServerStep:
    """Steps one after the other; the state of link k has names that begin with `k.`."""

    def init(model: Tensor) -> State:
        return _joined([check_state(link.name, "init", link.init(model)) for link in links])

    def parts(state: State) -> list[State]:
        return [_part(state, k) for k in range(len(links))]

    def apply(state: State, step: Tensor, round: Round) -> tuple[Tensor, State]:
        step, after = _applied(links, parts(state), step, round)
        return step, _joined(after)

    def observe(state: State, model: Tensor, round: Round) -> State:
        return _joined(_observed(links, parts(state), model, round))

    return ServerStep(init, apply, observe, name=", ".join(link.name for link in links))


def advance(
    links: Sequence[ServerStep],
    states: Sequence[State],
    round: Round,
    combined: Tensor,
    *,
    updated: bool,
) -> tuple[Tensor, list[State]]:
    """The next global model, after these steps one after the other, and their next states.

    `combined`: the weighted sum. `updated`: whether there is an update to step with.
    """
    model = combined
    if updated:
        inside = round.kept.clone()
        inside[round.parameters :] = False
        if round.came is not None:
            inside &= round.heard
        given = torch.where(inside, combined - round.global_model, 0.0)
        found, states = _applied(links, states, given, round)
        # A chain that leaves the step alone leaves the sum as it is, without the rounding of x + (sum - x).
        if found is not given:
            model = torch.where(inside, round.global_model + found, combined)
            _check_finite(links, model, round)
    return model, _observed(links, states, model, round)


def _applied(
    links: Sequence[ServerStep], states: Sequence[State], step: Tensor, round: Round
) -> tuple[Tensor, list[State]]:
    """Apply the steps in order, each to the output of the one before; return the last one and all states."""
    after = []
    for link, state in zip(links, states, strict=True):
        change, own = _checked_apply(link, state, step, round)
        # The next step must not take what this one remembers for news of a number that did not come.
        step = change if change is step else round.where_heard(change, 0.0)
        after.append(own)
    return step, after


def _observed(
    links: Sequence[ServerStep], states: Sequence[State], model: Tensor, round: Round
) -> list[State]:
    return [
        check_state(link.name, "observe", link.observe(state, model, round))
        for link, state in zip(links, states, strict=True)
    ]


def _checked_apply(link: ServerStep, state: State, step: Tensor, round: Round) -> tuple[Tensor, State]:
    stepped, following = pair(f"{link.name}: apply", "(step, state)", link.apply(state, step, round))
    fits = isinstance(stepped, Tensor) and stepped.shape == step.shape
    if not fits or stepped.dtype != step.dtype or stepped.device != step.device:
        got = describe(stepped)
        if isinstance(stepped, Tensor):
            got += f", {stepped.dtype} on {stepped.device}"
        raise ConfigError(
            f"{link.name}: the step must be a tensor of shape {[*step.shape]}, {step.dtype} on "
            f"{step.device}, got {got}"
        )
    return stepped, check_state(link.name, "apply", following)


def _check_finite(links: Sequence[ServerStep], model: Tensor, round: Round) -> None:
    # A sum is finite only if all that is in it is.
    if bool(torch.isfinite(model.sum())):
        return
    count = int((~torch.isfinite(model)).sum())
    if count:
        names = ", ".join(link.name for link in links if link is not UNCHANGED)
        raise NotFiniteError(
            f"{names}: the new model must be finite, got {count} numbers NaN or infinite in round "
            f"{round.number}"
        )


def _joined(states: list[State]) -> State:
    return {f"{k}.{name}": tensor for k, state in enumerate(states) for name, tensor in state.items()}


def _part(state: State, k: int) -> State:
    prefix = f"{k}."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
