"""Results of one trial, small enough to keep: final numbers, the evaluations, the choice of stand-ins."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from safari.aggregation import RULES
from safari.config import Arm, Config
from safari.errors import RunError
from safari.runs import CLASSIFICATION, RunMetrics, Trial, read_checkpoint, read_lines, summarise_trial
from safari.runs.files import is_there, read_object, write_atomically
from safari.runs.metrics import read_metrics
from safari.runs.summary import average_columns, wobbles
from safari.runs.tables import is_seconds
from safari.runs.versions import versions_of
from safari.stats import steadiness
from safari.text import visible

# The file next to a trial's records.
NUMBERS = "numbers.json"
# Columns of a trial that are compared, and whether more is better.
COLUMNS: dict[str, bool] = {
    "top1": True,
    "top5": True,
    "loss": False,
    "perplexity": False,
    "accuracy": True,
    "top1_wobble": False,
    "loss_wobble": False,
    "perplexity_wobble": False,
    "alternation": False,
    "average_top1": True,
    "average_top5": True,
    "average_loss": False,
    "average_perplexity": False,
    "average_accuracy": True,
    "average_top1_wobble": False,
    "average_loss_wobble": False,
    "rounds_to_target": False,
    "rounds_to_stay": False,
    "lost_updates": False,
    "bytes_up": False,
    "megabytes_up": False,
    "right_group": True,
    "error": False,
    "phi": False,
}
_SHARES = ("top1", "top5", "accuracy", "top1_wobble", "alternation", "lost_updates", "right_group")
# A little beyond what float32 holds, so that any loss is within it. Fourth powers of it, in tests and
# intervals, have a float, and figures have an axis for it: neither is so for what a float64 holds.
LARGEST = 1e40
# Columns that are parts of a whole, and those that may be large, but never below 0. Scores are neither: a task of
# somebody's own may count what it calls accuracy from 0 to 100.
_PARTS = ("lost_updates", "right_group")
_SIZES = ("alternation", "rounds_to_target", "rounds_to_stay", "bytes_up", "megabytes_up")
# Of a part of a whole that was computed in float32.
_ROUNDING = 1e-6
# As many as a config may ask for.
_MOST_ROUNDS = 1e9
# Options that rules were given after records were made, with the value that is what they did before.
_FORMER: dict[str, dict[str, Any]] = {
    "mifa": {"idle": False, "rescale": False},
    "known-p": {"form": "plain"},
}
_WINDOWS = 20
_DIGITS = 5

Numbers = dict[str, Any]


def is_share(column: str) -> bool:
    """Whether a column is a fraction, from 0 to 1."""
    return column.removeprefix("average_") in _SHARES


def write_numbers(trial: Trial, config: Config) -> Numbers:
    """Write a finished trial's numbers next to its records."""
    arm = next(arm for arm in config.arms if arm.name == trial.arm)
    metrics = read_metrics(trial.root)
    numbers = trial_numbers(trial.records(config.clients), config, group_of(config), metrics)
    numbers |= maker_of(arm)
    numbers["code"] = versions_of(trial)
    numbers["seconds"] = round(_seconds(trial), 3)
    similarity = read_checkpoint(trial.checkpoint).tensors.get("rule.similarity")
    if similarity is not None and similarity.ndim == 2:
        numbers["similarity"] = [[_rounded(v) for v in row] for row in similarity.tolist()]
    write_atomically(trial.path / NUMBERS, (json.dumps(numbers) + "\n").encode())
    return numbers


def read_numbers(path: Path, arm: Arm) -> Numbers | None:
    """The numbers in a trial's folder, if it is finished and was made by the arm as it is now."""
    file = path / NUMBERS
    if not is_there(file):
        return None
    numbers: Numbers = read_object(file)
    if problem := maker_problem(numbers) or problem_of(numbers):
        raise RunError(f"{file} does not hold a trial's numbers: {problem}; remove it")
    return numbers if made_by(numbers, arm) else None


def problem_of(numbers: Mapping[str, Any]) -> str:
    """First problem that keeps a trial's numbers from being used or shown; empty where there is none.

    The numbers may come from anywhere and are saved next to one's own, so they are checked before a page is made.

    >>> problem_of({"top1": 0.5, "loss": None, "curve": {"round": [1, 2]}}), problem_of({"top1": "much"})
    ('', "top1 must be null or a number from -1e+40 to 1e+40, got 'much'")
    """
    for name in COLUMNS:
        if problem := _number_problem(name, numbers.get(name), limits_of(name)):
            return problem
    for name in ("curve", "groups", "diagnosis"):
        if problem := _curves_problem(name, numbers[name]) if name in numbers else "":
            return problem
    rows = numbers.get("similarity") or []
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == len(rows) for row in rows):
        return "similarity must be a square of numbers"
    for value in (value for row in rows for value in row):
        if problem := _number_problem("similarity", value, limits_of("similarity")):
            return problem
    code = numbers.get("code") or []
    if not isinstance(code, list) or not all(isinstance(version, str) for version in code):
        return "code must be a list of texts"
    return next((problem for version in code if (problem := text_problem("code", version))), "")


def _curves_problem(table: str, columns: Any) -> str:
    """First problem of a table of numbers by round, which must name its rounds; empty where there is none."""
    if not isinstance(columns, dict) or not all(isinstance(column, list) for column in columns.values()):
        return f"{table} must be a table of lists of numbers"
    if "round" not in columns:
        there = visible(", ".join(columns), 60) or "nothing"
        return f"{table} must have round, the list of its rounds, got {there}"
    if len({len(column) for column in columns.values()}) > 1:
        return f"the lists of {table} must be of one length"
    for name, column in columns.items():
        of_rounds, where = name == "round", visible(f"{table}.{name}", 60)
        limits = (0.0, _MOST_ROUNDS) if of_rounds else limits_of(name)
        for value in column:
            if problem := _number_problem(where, value, limits, known=of_rounds):
                return problem
    return ""


def limits_of(column: str) -> tuple[float, float]:
    """Smallest and largest allowed value of a column.

    >>> limits_of("lost_updates"), limits_of("loss")
    ((0.0, 1.0), (-1e+40, 1e+40))
    """
    plain = column.removeprefix("average_")
    if plain in _PARTS:
        return 0.0, 1.0
    return 0.0 if plain in _SIZES or plain.endswith("_wobble") else -LARGEST, LARGEST


def _number_problem(name: str, value: Any, limits: tuple[float, float], *, known: bool = False) -> str:
    """Problem of a number, or nothing; None stands for an unknown one, unless it has to be `known`."""
    low, high = limits
    if value is None and not known:
        return ""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared as it is: a whole number may be too long for a float.
    if is_number and low - _ROUNDING <= value <= high + _ROUNDING:
        return ""
    return (
        f"{name} must be {'' if known else 'null or '}a number from {low:g} to {high:g}, got {_shown(value)}"
    )


def _shown(value: Any) -> str:
    """A value from a file, short: what is in a list or a table is left out."""
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else repr(value)[:60]


def text_problem(name: str, text: str) -> str:
    r"""Problem of a text that is to be written: JSON can hold lone surrogates, UTF-8 cannot.

    >>> text_problem("code", "0.1.0"), text_problem("code", "\ud800")
    ('', "code must be a text that UTF-8 can hold, got '\\ud800'")
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"{name} must be a text that UTF-8 can hold, got {text[:60]!r}"
    return ""


def maker_problem(entry: Mapping[str, Any]) -> str:
    """Problem that keeps `made_by` from comparing the rule of an entry; empty where there is none."""
    for name, value in (("rule", entry.get("rule")), ("defaults", entry.get("defaults", {}))):
        if not isinstance(value, dict):
            return f"{name} must be a table, got {_shown(value)}"
    return ""


def maker_of(arm: Arm) -> dict[str, dict[str, Any]]:
    """A rule with its options, the settings that the arm has of its own, and the rule's present defaults.

    A later version may have other defaults.
    """
    rule, own = arm.rule, {"set": dict(arm.set)} if arm.set else {}
    return {
        "rule": {"name": rule.name, **rule.options, **own},
        "defaults": RULES.defaults(rule.name, rule.options) or {},
    }


def made_by(entry: Mapping[str, Any], arm: Arm) -> bool:
    """Was this made by the rule that the arm has now? Entries that do not name defaults are believed.

    The entry is one in which `maker_problem` finds nothing.
    """
    now = maker_of(arm)
    former = {k: v for k, v in _FORMER.get(arm.rule.name, {}).items() if k not in arm.rule.options}
    then = {**former, **entry.get("defaults", now["defaults"])}
    return {**now, "rule": entry["rule"], "defaults": then} == now


def trial_numbers(
    records: Sequence[Mapping[str, Any]],
    config: Config,
    groups: Sequence[int] | None,
    metrics: RunMetrics = CLASSIFICATION,
) -> Numbers:
    """The summary of a trial, its curve, and how often a missing client's first stand-in was of its group."""
    summary = summarise_trial(records, config, metrics)
    names = [metric.name for metric in metrics.metrics]
    evaluated = [r for r in records if r[metrics.score] is not None]
    curve = {key: [_rounded(r[key]) for r in evaluated] for key in ("round", *names)}
    averaged = any(r.get("average") for r in evaluated)
    if averaged:
        for key in names:
            curve[f"average_{key}"] = [_rounded((r.get("average") or {}).get(key)) for r in evaluated]
    else:
        summary = {key: value for key, value in summary.items() if key not in average_columns(metrics)}
    sent = _sent(records)
    if sent is not None:
        curve["megabytes_up"] = [_rounded(sent[r["round"]]) for r in evaluated]
    numbers = {
        **steadiness_numbers(curve, config.rounds, config.evaluation.last, metrics),
        **summary,
        "megabytes_up": None if sent is None else sent[records[-1]["round"]],
        "curve": curve,
        "right_group": None,
        "error": None,
        "phi": None,
    }
    if groups is not None:
        numbers |= _right_groups(records, groups)
    diagnosed = [r for r in records if r.get("diagnosis")]
    if diagnosed:
        keys = ("error", "phi", "delta", "dissimilarity")
        series = {key: [_rounded(r["diagnosis"].get(key)) for r in diagnosed] for key in keys}
        numbers["diagnosis"] = {"round": [r["round"] for r in diagnosed], **series}
        for key in ("error", "phi"):
            known = [value for value in series[key] if value is not None]
            numbers[key] = fmean(known) if known else None
    return numbers | {name: _sayable(numbers[name]) for name in COLUMNS if name in numbers}


def steadiness_numbers(
    curve: Mapping[str, Sequence[Any]], rounds: int, last: int, metrics: RunMetrics = CLASSIFICATION
) -> Numbers:
    """Wobble of every curve within the last rounds, and the alternation of the score with its t statistic.

    `alternation` is the size of the difference between even and odd rounds, without the trend; None where
    only one of the two was tested. The sign is that of `alternation_t`: positive where even rounds are
    higher.
    """
    numbers: Numbers = {}
    for prefix in ("", "average_"):
        for name in wobbles(metrics):
            if f"{prefix}{name}" not in curve:
                continue
            window = [
                (r, v)
                for r, v in zip(curve["round"], curve[f"{prefix}{name}"], strict=True)
                if r > rounds - last and v is not None
            ]
            found = steadiness([r for r, _ in window], [v for _, v in window])
            numbers[f"{prefix}{name}_wobble"] = None if found is None else found.wobble
            if (prefix, name) == ("", metrics.score):
                # Shown in points, as shares are.
                size = None if found is None or not metrics.main.percent else found.alternation
                numbers["alternation"] = None if size is None else abs(size)
                numbers["alternation_t"] = None if found is None else found.t
    return numbers


def group_of(config: Config) -> list[int] | None:
    """The group of each client in the paper's partition; None where there are no groups."""
    if config.partition.name != "groups":
        return None
    blocks = np.array_split(np.arange(config.clients), int(config.partition.options.get("groups", 2)))
    return [group for group, block in enumerate(blocks) for _ in block]


def _sent(records: Sequence[Mapping[str, Any]]) -> dict[int, float] | None:
    """Megabytes that clients have sent up to each round, arrived or not; None where none were counted.

    A round in which no message was encoded is taken to have the size of the last one that was.
    """
    sizes = [r["bytes"]["up"] for r in records]
    size = next((s for s in sizes if s is not None), None)
    if size is None:
        return None
    found, total = {}, 0.0
    for record, own in zip(records, sizes, strict=True):
        size = size if own is None else own
        total += size * len(record["trained"]) / 1e6
        found[int(record["round"])] = total
    return found


def _right_groups(records: Sequence[Mapping[str, Any]], groups: Sequence[int]) -> Numbers:
    """The share of missing clients whose first stand-in was of their group: overall, and by windows."""
    hits = [
        (record["round"], groups[int(client)] == groups[stand_ins[0]])
        for record in records
        for client, stand_ins in record["stand_ins"].items()
        if stand_ins
    ]
    if not hits:
        return {}
    edges = np.linspace(0, records[-1]["round"], min(_WINDOWS, len(records)) + 1)
    window = np.clip(np.searchsorted(edges, [r for r, _ in hits], side="left") - 1, 0, len(edges) - 2)
    right, rounds, share = np.array([hit for _, hit in hits]), [], []
    for k in np.unique(window):
        rounds.append(_rounded(float((edges[k] + edges[k + 1]) / 2)))
        share.append(_rounded(float(right[window == k].mean())))
    return {"right_group": float(right.mean()), "groups": {"round": rounds, "share": share}}


def _seconds(trial: Trial) -> float:
    """Seconds of all rounds together; values that no process can have taken do not count."""
    found = (v for line in read_lines(trial.timings) for key, v in line.items() if key != "round")
    return math.fsum(v for v in found if is_seconds(v))


def _rounded(value: float | int | None) -> float | int | None:
    """Round to five digits: more than a figure shows, in a third of the space."""
    value = _sayable(value)
    return value if value is None or isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def _sayable(value: float | int | None) -> float | int | None:
    """The number, or None where it is none or beyond all limits, as of a run that diverged.

    >>> _sayable(1538.0), _sayable(math.exp(600)), _sayable(math.nan)
    (1538.0, None, None)
    """
    return value if value is not None and abs(value) <= LARGEST else None
