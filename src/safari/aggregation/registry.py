"""Every rule by the name that a config gives it; a rule's keyword arguments are its options."""

from __future__ import annotations

from collections.abc import Callable

from safari.aggregation.compensation import Compensation
from safari.aggregation.plus import safari_plus
from safari.aggregation.rivals import cluster_fedvarp, fdms, fedau, fedvarp, few, known_p, mifa, stale
from safari.aggregation.rules import drop, perfect, safari

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
}
