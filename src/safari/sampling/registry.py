"""Every sampling by the name that a config gives it; its keyword arguments are its options."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor

from safari.errors import ConfigError
from safari.hosting import build, hosted
from safari.sampling.clustered import clustered_similarity, clustered_size
from safari.sampling.sampling import Draw, Sampling, SamplingRound, State
from safari.sampling.simple import multinomial, uniform

SAMPLINGS: dict[str, Callable[..., Sampling]] = {
    "uniform": uniform,
    "multinomial": multinomial,
    "clustered-size": clustered_size,
    "clustered-similarity": clustered_similarity,
}


def sampling_of(name: str, options: Mapping[str, Any]) -> Sampling:
    """The sampling that a config names; the answers of a user's own are checked.

    >>> sampling_of("clustered-similarity", {"distance": "l3"})
    Traceback (most recent call last):
    ...
    safari.errors.ConfigError: sampling.distance must be one of arccos, l2, got 'l3'
    """
    sampling = build("sampling", "sampling", name, options, SAMPLINGS, Sampling)
    return sampling if name in SAMPLINGS else _checked(sampling, f"sampling.name: {name}")


def _checked(own: Sampling, where: str) -> Sampling:
    def init(*arguments: Any) -> State:
        return hosted(where, lambda: _state("init", own.init(*arguments)))

    def apply(state: State, round: SamplingRound) -> tuple[Draw, State]:
        return hosted(where, lambda: _answer(own.apply(state, round), round))

    def learn(state: State, ids: Tensor, updates: Tensor) -> State:
        return hosted(where, lambda: _state("learn", own.learn(state, ids, updates)))  # type: ignore[misc]

    return Sampling(apply, init, None if own.learn is None else learn)


def _answer(found: Any, round: SamplingRound) -> tuple[Draw, State]:
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Draw):
        raise ConfigError(f"apply must return (Draw, state), got {type(found).__name__}")
    draw, count = found[0], len(round.weights)
    clients = [int(client) for client in draw.clients]
    if not clients or any(a >= b for a, b in pairwise(clients)) or clients[0] < 0 or clients[-1] >= count:
        raise ConfigError(f"a draw's clients must ascend and lie between 0 and {count - 1}, got {clients}")
    if draw.shares is None:
        return Draw(tuple(clients)), _state("apply", found[1])
    shares = [float(share) for share in draw.shares]
    fits = len(shares) == len(clients) and all(share > 0 for share in shares)
    if not fits or not math.isclose(sum(shares), 1, rel_tol=1e-6):
        raise ConfigError(
            f"a draw's shares must be above 0, one for each of its {len(clients)} clients, and sum to 1, got {shares}"
        )
    return Draw(tuple(clients), tuple(shares)), _state("apply", found[1])


def _state(function: str, state: Any) -> State:
    if not isinstance(state, Mapping):
        raise ConfigError(f"the state that {function} returns must be a dict, got {type(state).__name__}")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ConfigError(
                f"the state that {function} returns must hold tensors by name, got {type(value).__name__} as {name!r}"
            )
    return dict(state)
