"""Gates: which arrivals a rule gets to see."""

from safari.aggregation.gates.gate import Gate, Ruling, admitted, judge, without
from safari.aggregation.gates.registry import GATES, gate_defaults, gate_of, is_known_gate

__all__ = [
    "GATES",
    "Gate",
    "Ruling",
    "admitted",
    "gate_defaults",
    "gate_of",
    "is_known_gate",
    "judge",
    "without",
]
