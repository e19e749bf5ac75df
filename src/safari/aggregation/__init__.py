"""The server's side (Algorithm 3): similarity, compensation, the weighted sum."""

from safari.aggregation.compensation import Compensation, Decision, Phases, Round, Weights, combine
from safari.aggregation.gates import GATES, Gate, Ruling
from safari.aggregation.registry import RULES
from safari.aggregation.rule import rule
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
    "Compensation",
    "Decision",
    "Gate",
    "Outcome",
    "Phases",
    "Round",
    "Ruling",
    "Server",
    "ServerStep",
    "Weights",
    "average",
    "chain",
    "combine",
    "kept_share",
    "observe",
    "rule",
    "running_average",
    "stand_in",
    "to_tensors",
    "unknown",
    "with_tensors",
]
