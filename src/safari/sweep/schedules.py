"""Cases of a sweep that test only part of what their links do over time."""

from __future__ import annotations

from collections import defaultdict

from safari.engine.checks import unseen_phases
from safari.links import LINKS
from safari.sweep.plan import Sweep


def partial_tests(sweep: Sweep) -> dict[str, list[str]]:
    """Notes about the tests, each with the names of the cases that it applies to."""
    found: dict[str, list[str]] = defaultdict(list)
    for case in sweep.cases:
        config = case.config
        for direction, part in (("uplink", config.uplink), ("downlink", config.downlink)):
            period = LINKS.build(part.name, part.options, direction).period
            note = unseen_phases(direction, period, config.evaluation, config.rounds)
            if note:
                found[note].append(case.name)
    return dict(found)
