"""The summary of a run: final accuracy, how steady it is, and how long it took, for each arm over the seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from safari.config import Config
from safari.errors import RunError
from safari.runs.folder import RunFolder, Trial
from safari.runs.metrics import CLASSIFICATION, RunMetrics
from safari.runs.record import OVER_CLIENTS, RoundRecord
from safari.runs.soundness import Course, course_of, warnings
from safari.stats import steadiness
from safari.tasks import Metric

Record = Mapping[str, Any]


def wobbles(metrics: RunMetrics = CLASSIFICATION) -> tuple[str, ...]:
    """The metrics whose wobble is kept: their standard deviation without trend and alternation (safari.stats).

    >>> wobbles()
    ('top1', 'loss')
    """
    return tuple(name for name in dict.fromkeys((metrics.score, "loss")) if name in metrics.names)


def average_columns(metrics: RunMetrics = CLASSIFICATION) -> tuple[str, ...]:
    """The columns of a summary that are about the running average; None in runs that keep none."""
    names = (*metrics.names, *(f"{name}_wobble" for name in wobbles(metrics)))
    return tuple(f"average_{name}" for name in names)


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


def summarise_trial(
    records: Sequence[Record], config: Config, metrics: RunMetrics = CLASSIFICATION
) -> dict[str, Any]:
    """One trial: means over the evaluations in the last rounds so far, and when the target was reached.

    `rounds_to_target` is the first round in which the score is at the target or better, `rounds_to_stay` the first
    after which it was never worse again: an arm that jumps up and down touches the target long before it stays there.

    Args:
        records: the trial's records, or objects with the fields of their lines.
        config: the run's config.
        metrics: those of the run's task.
    """
    score, target = metrics.score, config.evaluation.goal(metrics.main.percent)
    evaluated = [r for r in records if r[score] is not None]
    done = records[-1]["round"] if records else 0
    # A run that goes on may have its newest evaluation before the last rounds.
    last = [r for r in evaluated if r["round"] > done - config.evaluation.last] or evaluated[-1:]
    good = [_reaches(r[score], target, metrics.main) for r in evaluated]
    reached = [r["round"] for r, is_good in zip(evaluated, good, strict=True) if is_good]
    worse = [r["round"] for r, is_good in zip(evaluated, good, strict=True) if not is_good]
    stays = [t for t in reached if t > max(worse, default=0)]
    asked = sum(len(r["arrived"]) + len(r["missing"]) for r in records)
    arrived = sum(len(r["arrived"]) for r in records)
    # Records from before there was one do not name it.
    averages = [{"round": r["round"], **r["average"]} for r in last if r.get("average")]
    return {
        "rounds": done,
        "finished": done >= config.rounds,
        **final_scores(last, metrics),
        **{f"average_{name}": value for name, value in final_scores(averages, metrics).items()},
        "rounds_to_target": reached[0] if reached else None,
        "rounds_to_stay": stays[0] if stays else None,
        "lost_updates": 1 - arrived / asked if asked else None,
        "bytes_up": _mean([r["bytes"] for r in records], "up"),
        "bytes_down": _mean([r["bytes"] for r in records], "down"),
        "refused": sum(len(r["refused"]) for r in records),
        **_over_clients([r["clients"] for r in last if r.get("clients")]),
    }


def _reaches(score: float, target: float | None, metric: Metric) -> bool:
    if target is None:
        return False
    return score >= target if metric.higher else score <= target


def _over_clients(found: Sequence[Record]) -> dict[str, float | None]:
    """The scores on what clients hold out, over the last evaluations; nothing where clients hold nothing out."""
    return {f"clients_{name}": _mean(found, name) for name in OVER_CLIENTS} if found else {}


def done_records(trial: Trial, rounds: int, skipped: list[str] | None = None) -> list[RoundRecord]:
    """The records of a trial.

    RunError where more rounds are done than are asked for, or a line is damaged; where there is a list for it
    (`skipped`), such a line is left out and named there.
    """
    records = trial.records(skipped=skipped)
    done = records[-1].round if records else 0
    if done > rounds:
        raise RunError(f"rounds must be at least the {done} that {trial.path} has done, got {rounds}")
    return records


def summarise(run: RunFolder, skipped: list[str] | None = None) -> dict[str, Any]:
    """The whole run, as it stands: `summary.json`.

    Args:
        run: the run.
        skipped: where damaged lines of its records are named. Without it, the first one raises a RunError.
    """
    config, metrics = run.config, run.metrics
    trials: dict[str, dict[str, Any]] = {arm.name: {} for arm in config.arms}
    courses: dict[str, list[Course]] = {arm.name: [] for arm in config.arms}
    for trial in run.trials():
        problems: list[str] | None = None if skipped is None else []
        records = done_records(trial, config.rounds, problems)
        trials[trial.arm][str(trial.seed)] = summarise_trial(records, config, metrics)
        complete = bool(records) and records[-1].round >= config.rounds
        courses[trial.arm].append(course_of(records, metrics, complete=complete))
        if skipped is not None:
            skipped += [f"{trial.arm}, seed {trial.seed}: {problem}" for problem in problems or ()]
    return {"name": config.name, "config": config.digest, **whole(config, metrics, trials, courses)}


def whole(
    config: Config,
    metrics: RunMetrics,
    trials: Mapping[str, Mapping[str, Mapping[str, Any]]],
    courses: Mapping[str, Sequence[Course]],
) -> dict[str, Any]:
    """Summary of a run for its table: its setting and every arm over its seeds.

    Args:
        config: the run's config.
        metrics: those of its task.
        trials: by arm and seed, what `summarise_trial` says.
        courses: by arm, of each seed, what `course_of` says.
    """
    return {
        "rounds": config.rounds,
        "seeds": config.seeds,
        "last": config.evaluation.last,
        "target": config.evaluation.goal(metrics.main.percent),
        "metrics": metrics.to_json(),
        "warnings": warnings(courses, metrics),
        "arms": {
            arm: over_seeds(list(seeds.values()), metrics) | {"seeds": seeds} for arm, seeds in trials.items()
        },
    }


def best_score(records: Sequence[Record], metrics: RunMetrics = CLASSIFICATION) -> float | None:
    """The best score in some records; None where nothing was tested."""
    found = [record[metrics.score] for record in records if record[metrics.score] is not None]
    return None if not found else max(found) if metrics.main.higher else min(found)


def over_seeds(trials: Sequence[Mapping[str, Any]], metrics: RunMetrics = CLASSIFICATION) -> dict[str, Any]:
    """Mean, spread and n of each number of an arm, over its seeds."""
    names = (
        *(metric.name for metric in metrics.metrics),
        *(f"{name}_wobble" for name in wobbles(metrics)),
        *average_columns(metrics),
        "rounds_to_target",
        "rounds_to_stay",
        "lost_updates",
        "bytes_up",
        "bytes_down",
        "refused",
    )
    names += tuple(f"clients_{name}" for name in OVER_CLIENTS if any(f"clients_{name}" in t for t in trials))
    columns = {name: [t[name] for t in trials if t.get(name) is not None] for name in names}
    return {name: spread(values) for name, values in columns.items()} | {
        "reached_target": f"{len(columns['rounds_to_target'])} of {len(trials)}",
        "stayed_at_target": f"{len(columns['rounds_to_stay'])} of {len(trials)}",
    }


def final_scores(
    evaluations: Sequence[Record], metrics: RunMetrics = CLASSIFICATION
) -> dict[str, float | None]:
    """Means of the metrics over some evaluations, and how far some jump up and down: their wobble."""
    return {name: _mean(evaluations, name) for name in metrics.names} | {
        f"{name}_wobble": _wobble(evaluations, name) for name in wobbles(metrics)
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
