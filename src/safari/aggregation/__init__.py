"""The server's side (Algorithm 3): similarity, compensation, the weighted sum."""

from safari.aggregation.compensation import BlockWeights, Compensation, Decision, Round, combine
from safari.aggregation.gates import GATES, Gate, Ruling, gate_defaults, gate_of, is_known_gate
from safari.aggregation.registry import RULES, is_known, rule_defaults, rule_of
from safari.aggregation.rules import stand_in
from safari.aggregation.server import Outcome, Server
from safari.aggregation.similarity import observe, unknown
from safari.aggregation.steps import (
    STEPS,
    ServerStep,
    average,
    chain,
    is_known_step,
    kept_share,
    running_average,
    step_defaults,
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
    "gate_defaults",
    "gate_of",
    "is_known",
    "is_known_gate",
    "is_known_step",
    "kept_share",
    "observe",
    "rule_defaults",
    "rule_of",
    "running_average",
    "stand_in",
    "step_defaults",
    "to_tensors",
    "unknown",
    "with_tensors",
]
