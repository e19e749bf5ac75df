"""Every rule by the name that a config gives it; a rule's keyword arguments are its options."""

from __future__ import annotations

from collections.abc import Callable

from safari.aggregation.blue import blue
from safari.aggregation.compensation import Compensation
from safari.aggregation.fedstale import fedstale
from safari.aggregation.majority_vote import majority_vote
from safari.aggregation.plus import safari_plus
from safari.aggregation.rivals import cluster_fedvarp, fdms, fedau, fedvarp, few, known_p, mifa, stale
from safari.aggregation.robust import geometric_median, trimmed_mean
from safari.aggregation.rules import attainable, drop, perfect, safari
from safari.kinds import Kind

RULES: Kind[Callable[..., Compensation]] = Kind(
    "rule",
    Compensation,
    {
        "perfect": perfect,
        "attainable": attainable,
        "drop": drop,
        "safari": safari,
        "safari+": safari_plus,
        "blue": blue,
        "stale": stale,
        "fdms": fdms,
        "mifa": mifa,
        "fedvarp": fedvarp,
        "cluster-fedvarp": cluster_fedvarp,
        "fedstale": fedstale,
        "fedau": fedau,
        "known-p": known_p,
        "few": few,
        "trimmed-mean": trimmed_mean,
        "geometric-median": geometric_median,
        "majority-vote": majority_vote,
    },
    tables=("arms",),
    key="",
)
