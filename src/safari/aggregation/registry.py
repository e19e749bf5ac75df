"""Every rule by the name that a config gives it; a rule's keyword arguments are its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from safari.aggregation.compensation import Compensation
from safari.aggregation.plus import safari_plus
from safari.aggregation.rivals import cluster_fedvarp, fdms, fedau, fedvarp, few, known_p, mifa, stale
from safari.aggregation.robust import geometric_median, trimmed_mean
from safari.aggregation.rules import drop, perfect, safari
from safari.plugins import defaults_of, known

RULES: dict[str, Callable[..., Compensation]] = {
    "perfect": perfect,
    "drop": drop,
    "safari": safari,
    "safari+": safari_plus,
    "stale": stale,
    "fdms": fdms,
    "mifa": mifa,
    "fedvarp": fedvarp,
    "cluster-fedvarp": cluster_fedvarp,
    "fedau": fedau,
    "known-p": known_p,
    "few": few,
    "trimmed-mean": trimmed_mean,
    "geometric-median": geometric_median,
}


def rule_defaults(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are left as the rule has them today: a later version may have others.

    Nothing is imported for this: a user's rule that is not loaded has none (`is_known`).

    >>> rule_defaults("fedau", {})
    {'cutoff': 50}
    """
    factory = known("rule", name, RULES)
    return defaults_of(factory, given) if callable(factory) else {}


def is_known(name: str) -> bool:
    """Can a rule's defaults be told without importing anything?"""
    return callable(known("rule", name, RULES))
