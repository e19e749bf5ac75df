"""RigL: rigging the lottery (Evci et al., ICML 2020), with the clients' gradients."""

from __future__ import annotations

from torch import Tensor

from safari.errors import ConfigError
from safari.pruning.policies.regrow import Pace, regrowing
from safari.pruning.policy import MaskPolicy, MaskRound, State


def rigl(
    *,
    interval: int = 10,
    fraction: float = 0.3,
    stop: float = 0.75,
    breadth: float = 2.0,
    stand_ins: bool = True,
) -> MaskPolicy:
    """RigL: the smallest weights are cut, and those with the largest gradient |Σ_i a_i g_i| come back.

    `breadth`: clients report their gradient at so many times the weights that will come back. `stand_ins`: a
    client that stood in for others speaks for them here, too. `interval`, `fraction` and `stop` as in SET. A
    round of which no report arrived moves nothing.
    """
    if not 1 <= breadth <= 100:
        raise ConfigError(f"breadth must lie between 1 and 100, got {breadth}")

    def growth(state: State, round: MaskRound) -> tuple[Tensor | None, State]:
        arrivals = round.arrivals
        if arrivals is None or arrivals.votes is None:
            return None, state
        weights = (arrivals.weights if stand_ins else arrivals.own).to(arrivals.votes)
        return (weights @ arrivals.votes).abs(), state

    return regrowing("rigl", Pace(interval, fraction, stop), growth, voters=breadth)
