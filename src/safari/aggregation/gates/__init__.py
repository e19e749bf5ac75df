"""Gates: which arrivals a rule gets to see."""

from safari.aggregation.gates.gate import Gate, Ruling, admitted, judge, without
from safari.aggregation.gates.registry import GATES

__all__ = [
    "GATES",
    "Gate",
    "Ruling",
    "admitted",
    "judge",
    "without",
]
