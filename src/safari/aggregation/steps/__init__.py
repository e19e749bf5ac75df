"""Server steps: what the server does with the change that the weighted sum gave. One file a paper."""

from safari.aggregation.steps.average import average, kept_share, running_average
from safari.aggregation.steps.registry import STEPS, steps_of
from safari.aggregation.steps.step import UNCHANGED, ServerStep, advance, chain

__all__ = [
    "STEPS",
    "UNCHANGED",
    "ServerStep",
    "advance",
    "average",
    "chain",
    "kept_share",
    "running_average",
    "steps_of",
]
