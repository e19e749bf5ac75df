"""The server's side (Algorithm 3): similarity, compensation, the weighted sum."""

from safari.aggregation.compensation import BlockWeights, Compensation, Decision, Round, combine
from safari.aggregation.gates import GATES, Gate, Ruling
from safari.aggregation.registry import RULES
from safari.aggregation.rules import stand_in
from safari.aggregation.server import Outcome, Server
from safari.aggregation.similarity import observe, unknown
from safari.aggregation.steps import (
    STEPS,
    ServerStep,
    average,
    chain,
    kept_share,
    running_average,
)
from safari.aggregation.store import to_tensors, with_tensors

__all__ = [
    "GATES",
    "RULES",
    "STEPS",
    "BlockWeights",
    "Compensation",
    "Decision",
    "Gate",
    "Outcome",
    "Round",
    "Ruling",
    "Server",
    "ServerStep",
    "average",
    "chain",
    "combine",
    "kept_share",
    "observe",
    "running_average",
    "stand_in",
    "to_tensors",
    "unknown",
    "with_tensors",
]
