"""What a run came to: final accuracy, how steady it is, and how long it took, for each arm over the seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from safari.config import Config
from safari.errors import RunError
from safari.runs.folder import RunFolder, Trial
from safari.runs.record import RoundRecord
from safari.stats import steadiness

Record = Mapping[str, Any]

# What a test of a model finds.
SCORES = ("loss", "top1", "top5")
# The scores whose wobble is kept: their standard deviation without trend and alternation (safari.stats).
WOBBLES = ("top1", "loss")
# The same for the running average of the models; None where none was kept.
AVERAGE_COLUMNS = tuple(f"average_{name}" for name in (*SCORES, *(f"{name}_wobble" for name in WOBBLES)))


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, sample standard deviation and n; None for what cannot be said.

    >>> spread([1.0, 3.0])
    {'mean': 2.0, 'std': 1.4142135623730951, 'n': 2}
    >>> spread([5.0])
    {'mean': 5.0, 'std': None, 'n': 1}
    """
    return {
        "mean": fmean(values) if values else None,
        "std": stdev(values) if len(values) > 1 else None,
        "n": len(values),
    }


def summarise_trial(records: Sequence[Record], config: Config) -> dict[str, Any]:
    """One trial: means over the evaluations in the last rounds so far, and when the target was reached.

    `rounds_to_target` is the first round at the target, `rounds_to_stay` the first after which accuracy
    never fell below it again: an arm that jumps up and down touches the target long before it stays there.
    """
    evaluated = [r for r in records if r["top1"] is not None]
    done = records[-1]["round"] if records else 0
    # A run that goes on may have its newest evaluation before the last rounds.
    last = [r for r in evaluated if r["round"] > done - config.evaluation.last] or evaluated[-1:]
    reached = [r["round"] for r in evaluated if r["top1"] >= config.evaluation.target]
    below = [r["round"] for r in evaluated if r["top1"] < config.evaluation.target]
    stays = [t for t in reached if t > max(below, default=0)]
    asked = sum(len(r["arrived"]) + len(r["missing"]) for r in records)
    arrived = sum(len(r["arrived"]) for r in records)
    # Records from before there was one do not name it.
    averages = [{"round": r["round"], **r["average"]} for r in last if r.get("average")]
    return {
        "rounds": len(records),
        "finished": len(records) >= config.rounds,
        **final_scores(last),
        **{f"average_{name}": value for name, value in final_scores(averages).items()},
        "rounds_to_target": reached[0] if reached else None,
        "rounds_to_stay": stays[0] if stays else None,
        "lost_updates": 1 - arrived / asked if asked else None,
        "bytes_up": _mean([r["bytes"] for r in records], "up"),
        "bytes_down": _mean([r["bytes"] for r in records], "down"),
        "refused": sum(len(r["refused"]) for r in records),
    }


def done_records(trial: Trial, rounds: int) -> list[RoundRecord]:
    """The records of a trial; RunError where a line is none, or more rounds are done than are asked for."""
    records = trial.records()
    if len(records) > rounds:
        raise RunError(f"rounds must be at least the {len(records)} that {trial.path} has done, got {rounds}")
    return records


def summarise(run: RunFolder) -> dict[str, Any]:
    """The whole run, as it stands: `summary.json`."""
    config = run.config
    trials: dict[str, dict[str, Any]] = {arm.name: {} for arm in config.arms}
    for trial in run.trials():
        records = done_records(trial, config.rounds)
        trials[trial.arm][str(trial.seed)] = summarise_trial(records, config)
    return {
        "name": config.name,
        "config": config.digest,
        "rounds": config.rounds,
        "last": config.evaluation.last,
        "target": config.evaluation.target,
        "arms": {arm: over_seeds(list(seeds.values())) | {"seeds": seeds} for arm, seeds in trials.items()},
    }


def over_seeds(trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean, spread and n of each number of an arm, over its seeds."""
    names = (
        "top1",
        "top5",
        "loss",
        *(f"{name}_wobble" for name in WOBBLES),
        *AVERAGE_COLUMNS,
        "rounds_to_target",
        "rounds_to_stay",
        "lost_updates",
        "bytes_up",
        "bytes_down",
        "refused",
    )
    columns = {name: [t[name] for t in trials if t[name] is not None] for name in names}
    return {name: spread(values) for name, values in columns.items()} | {
        "reached_target": f"{len(columns['rounds_to_target'])} of {len(trials)}",
        "stayed_at_target": f"{len(columns['rounds_to_stay'])} of {len(trials)}",
    }


def final_scores(evaluations: Sequence[Record]) -> dict[str, float | None]:
    """Means of the scores over some evaluations, and how far each jumps up and down: its wobble."""
    return {name: _mean(evaluations, name) for name in SCORES} | {
        f"{name}_wobble": _wobble(evaluations, name) for name in WOBBLES
    }


def _wobble(evaluations: Sequence[Record], name: str) -> float | None:
    known = [e for e in evaluations if _is_finite(e[name])]
    found = steadiness([e["round"] for e in known], [e[name] for e in known])
    return None if found is None else found.wobble


def _mean(records: Sequence[Record], key: str) -> float | None:
    values = [r[key] for r in records if _is_finite(r[key])]
    return fmean(values) if values else None


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
