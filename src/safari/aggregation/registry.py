"""Every rule by the name that a config gives it; a rule's keyword arguments are its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from safari.aggregation.compensation import Compensation, Decision, Round, State
from safari.aggregation.majority_vote import majority_vote
from safari.aggregation.plus import safari_plus
from safari.aggregation.rivals import cluster_fedvarp, fdms, fedau, fedvarp, few, known_p, mifa, stale
from safari.aggregation.robust import geometric_median, trimmed_mean
from safari.aggregation.rules import attainable, drop, perfect, safari
from safari.hosting import build, hosted
from safari.plugins import defaults_of, known

RULES: dict[str, Callable[..., Compensation]] = {
    "perfect": perfect,
    "attainable": attainable,
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
    "majority-vote": majority_vote,
}


def rule_of(name: str, options: Mapping[str, Any]) -> Compensation:
    """The rule that an arm names, with its options; a user's own is called under its name.

    >>> rule_of("fedau", {"cutoff": 0})
    Traceback (most recent call last):
    ...
    safari.errors.ConfigError: arms: cutoff must lie between 1 and 1000000000, got 0
    """
    rule = build("rule", "arms", name, options, RULES, Compensation)
    return rule if name in RULES else _checked(rule, f"arms: {name}")


def _checked(rule: Compensation, where: str) -> Compensation:
    """A user's rule by its name; the server looks at its decisions."""

    def apply(state: State, round: Round) -> tuple[Decision, State]:
        found: tuple[Decision, State] = hosted(where, lambda: _with_plain_ids(rule.apply(state, round)))
        return found

    def learn(state: State, round: Round) -> State:
        found: State = hosted(where, lambda: rule.learn(state, round))  # type: ignore[misc]
        return found

    def respond(state: State, round: Round) -> tuple[Decision, State]:
        given = rule.respond or rule.apply
        found: tuple[Decision, State] = hosted(where, lambda: _with_plain_ids(given(state, round)))
        return found

    checked = replace(rule, apply=apply, name=where)
    return checked if rule.learn is None else replace(checked, learn=learn, respond=respond)


def _with_plain_ids(found: Any) -> Any:
    """The answer with stand-ins by Python's whole numbers, which records can hold; else as it is."""
    decision: Any = found[0] if isinstance(found, tuple) and found else None
    if not isinstance(decision, Decision) or not isinstance(decision.stand_ins, dict):
        return found
    names = {int(j): tuple(int(i) for i in who) for j, who in decision.stand_ins.items()}
    return replace(decision, stand_ins=names), *found[1:]


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
