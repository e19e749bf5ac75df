"""Samplings by name, and what a draw of a user's own must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from safari.contracts import pair, tensors
from safari.errors import ConfigError
from safari.kinds import Kind
from safari.sampling.clustered import clustered_similarity, clustered_size
from safari.sampling.sampling import Draw, Sampling, SamplingRound, State
from safari.sampling.simple import multinomial, uniform


def _draw(found: Any, state: State, round: SamplingRound) -> tuple[Draw, State]:
    draw, after = pair("apply", "(Draw, state)", found, Draw)
    count, clients = len(round.weights), [int(client) for client in draw.clients]
    if not clients or any(a >= b for a, b in pairwise(clients)) or clients[0] < 0 or clients[-1] >= count:
        raise ConfigError(f"a draw's clients must ascend and lie between 0 and {count - 1}, got {clients}")
    after = tensors("the state that apply returns", after)
    if draw.shares is None:
        return Draw(tuple(clients)), after
    shares = [float(share) for share in draw.shares]
    fits = len(shares) == len(clients) and all(share > 0 for share in shares)
    if not fits or not math.isclose(sum(shares), 1, rel_tol=1e-6):
        raise ConfigError(
            f"a draw's shares must be above 0, one for each of its {len(clients)} clients, and sum to 1, got {shares}"
        )
    return Draw(tuple(clients), tuple(shares)), after


def _state(function: str, found: Any, *given: Any) -> State:
    return tensors(f"the state that {function} returns", found)


SAMPLINGS: Kind[Callable[..., Sampling]] = Kind(
    "sampling",
    Sampling,
    {
        "uniform": uniform,
        "multinomial": multinomial,
        "clustered-size": clustered_size,
        "clustered-similarity": clustered_similarity,
    },
    tables=("sampling",),
    contract={"init": partial(_state, "init"), "apply": _draw, "learn": partial(_state, "learn")},
)
