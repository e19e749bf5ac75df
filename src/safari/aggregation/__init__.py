"""The server's side (Algorithm 3): similarity, compensation, the weighted sum."""

from safari.aggregation.average import kept_share, running_average
from safari.aggregation.compensation import Compensation, Decision, Round, combine
from safari.aggregation.registry import RULES, is_known, rule_defaults, rule_of
from safari.aggregation.rules import stand_in
from safari.aggregation.server import Outcome, Server
from safari.aggregation.similarity import observe, unknown
from safari.aggregation.store import to_tensors, with_tensors

__all__ = [
    "RULES",
    "Compensation",
    "Decision",
    "Outcome",
    "Round",
    "Server",
    "combine",
    "is_known",
    "kept_share",
    "observe",
    "rule_defaults",
    "rule_of",
    "running_average",
    "stand_in",
    "to_tensors",
    "unknown",
    "with_tensors",
]
