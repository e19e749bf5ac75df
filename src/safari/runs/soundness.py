"""Sentences on why the results of a run are meaningless, for the table, the page and `summary.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safari.runs.metrics import RunMetrics
from safari.text import visible

_LONGEST_NAMES = 200


@dataclass(frozen=True)
class Course:
    """The course of one trial, as far as it tells whether anything was learned.

    rounds: how many are recorded. arrived, missing: updates in all of them. scores: the score of each test.
    diverged: the newest loss is not a finite number, and an earlier one was. dead: layers of which nothing is left.
    """

    rounds: int
    arrived: int
    missing: int
    scores: tuple[float, ...]
    diverged: bool
    dead: tuple[str, ...]


def course_of(records: Sequence[Mapping[str, Any]], metrics: RunMetrics, *, complete: bool) -> Course:
    """The course of a trial from its records; `complete`: the last of them is that of a run's last round, which is
    always tested."""
    layers = (records[-1].get("layers") or {}) if records else {}
    losses = [record.get("loss") for record in records]
    return Course(
        rounds=len(records),
        arrived=sum(len(record["arrived"]) for record in records),
        missing=sum(len(record["missing"]) for record in records),
        scores=tuple(record[metrics.score] for record in records if record[metrics.score] is not None),
        diverged=complete and any(loss is not None for loss in losses) and losses[-1] is None,
        dead=tuple(name for name, left in layers.items() if left == 0),
    )


def warnings(arms: Mapping[str, Sequence[Course]], metrics: RunMetrics) -> list[str]:
    """Why the results of these arms, each over its seeds, say nothing or less than they seem to.

    >>> from safari.runs.metrics import CLASSIFICATION
    >>> course = Course(rounds=3, arrived=4, missing=2, scores=(0.1, 0.1, 0.1), diverged=False, dead=())
    >>> for line in warnings({"drop": [course], "safari": [course]}, CLASSIFICATION):
    ...     print(line)
    drop: the top-1 accuracy is the same in all 3 tests, so nothing was learned
    safari: the top-1 accuracy is the same in all 3 tests, so nothing was learned
    all 2 arms end with the same top-1 accuracy, so they cannot be compared
    """
    score = metrics.main.label
    found = [f"{arm}: {line}" for arm, courses in arms.items() for line in _of_arm(courses, score)]
    courses = [course for each in arms.values() for course in each if course.rounds]
    ends = {arm: tuple(c.scores[-1] for c in each if c.scores) for arm, each in arms.items()}
    alike = len(set(ends.values())) == 1 and all(ends.values()) and len({c.rounds for c in courses}) == 1
    if len(arms) > 1 and alike:
        lost = any(course.missing for course in courses)
        why = (
            "so they cannot be compared"
            if lost
            else "because no update was lost: there was nothing to compare"
        )
        found.append(f"all {len(arms)} arms end with the same {score}, {why}")
    return found


def _of_arm(courses: Sequence[Course], score: str) -> list[str]:
    found = []
    if any(course.rounds and not course.arrived for course in courses):
        found.append("no update ever arrived, so this is the model that it began with")
    elif any(len(course.scores) > 2 and len(set(course.scores)) == 1 for course in courses):
        tests = max(len(course.scores) for course in courses if len(set(course.scores)) == 1)
        found.append(f"the {score} is the same in all {tests} tests, so nothing was learned")
    if any(course.diverged for course in courses):
        found.append("the loss of the last model is not a finite number: training diverged")
    dead = dict.fromkeys(name for course in courses for name in course.dead)
    if dead:
        found.append(
            f"nothing is left of {visible(', '.join(dead), _LONGEST_NAMES)}, so nothing passes there"
        )
    return found
