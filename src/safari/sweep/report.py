"""The table of a sweep: every case and arm, and how far it is behind the best, with a paired test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safari.report.table import aligned, heading, markdown
from safari.runs.files import is_there, making, write_atomically
from safari.runs.metrics import CLASSIFICATION, RunMetrics, read_metrics
from safari.stats import Interval
from safari.sweep.paired import ALPHA, Standing, Trials, spelled_p, standings
from safari.sweep.plan import Sweep
from safari.sweep.results import Results
from safari.tasks import Metric

_NOTHING = "–"
Key = tuple[str, str]


def rows_of(sweep: Sweep, results: Results, out: Path) -> list[dict[str, Any]]:
    """A row for each case and arm, of the newest models and, where there are any, of their running averages.

    Arms of a case are compared with each other; where every case has one arm that is ranked, the cases are.
    """
    metric = metrics_of(sweep, out).main
    found = []
    for column in (metric.name, f"average_{metric.name}"):
        for group in _groups(sweep, results):
            unranked = [key for key in group if key[1] in sweep.unranked]
            standing = standings(group, column, unranked, higher=metric.higher)
            found += [
                _row(case, arm, column, standing[case, arm], sweep)
                for case, arm in group
                if standing[case, arm] is not None or not column.startswith("average_")
            ]
    return found


def text(sweep: Sweep, results: Results, out: Path) -> str:
    """The table for a terminal, with what its columns mean."""
    header, body = _cells(sweep, results, out)
    return f"{aligned(header, body)}{explain(sweep, out)}\n"


def write(sweep: Sweep, results: Results, out: Path) -> Path:
    """Write the table as Markdown into the sweep's folder; returns its path."""
    folder = out / sweep.name
    with making(folder):
        page = f"# {sweep.title or sweep.name}\n\n{markdown(*_cells(sweep, results, out))}\n{explain(sweep, out)}\n"
        write_atomically(folder / "table.md", page.encode())
    return folder / "table.md"


def explain(sweep: Sweep, out: Path) -> str:
    """Explanation of the columns."""
    metric = metrics_of(sweep, out).main
    return (
        f"{heading(metric)}: mean over the evaluations of the last rounds, then over seeds, ± half of its 95 % "
        "interval (Student's t). Behind: the best minus this, seed by seed. p: paired t-test against the best, Holm's "
        f"correction over those that share a best; above {ALPHA:g} no difference is shown."
    )


def metrics_of(sweep: Sweep, out: Path) -> RunMetrics:
    """Metrics of a sweep's tests: those of its first run on disk, otherwise those of classification."""
    for case in sweep.cases:
        folder = out / case.sweep / case.folder
        if is_there(folder / "config.toml"):
            return read_metrics(folder)
    return CLASSIFICATION


def _groups(sweep: Sweep, results: Results) -> Iterator[Mapping[Key, Trials]]:
    """Groups of trials that are compared with each other."""
    by_case = {case.name: results.arms(case) for case in sweep.cases}
    whole = {(case, arm): trials for case, arms in by_case.items() for arm, trials in arms.items()}
    if all(len([arm for arm in arms if arm not in sweep.unranked]) == 1 for arms in by_case.values()):
        yield whole
        return
    for case in by_case:
        yield {key: trials for key, trials in whole.items() if key[0] == case}


def _row(case: str, arm: str, column: str, standing: Standing | None, sweep: Sweep) -> dict[str, Any]:
    asked = next(c for c in sweep.cases if c.name == case).config.seeds
    row = {"case": case, "arm": arm, "column": column, "asked": asked, "n": 0, "mark": ""}
    if standing is None:
        return row
    behind = standing.behind
    return row | {
        "n": standing.n,
        "mean": standing.mean,
        "interval": _ends(standing.interval),
        "mark": standing.mark,
        "behind": None if behind is None else behind.mean,
        "behind_interval": None if behind is None else _ends(behind.interval),
        "p": standing.p,
    }


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _cells(sweep: Sweep, results: Results, out: Path) -> tuple[list[str], list[list[str]]]:
    metric = metrics_of(sweep, out).main
    header = ["case / arm", "", heading(metric), "behind", "p", "seeds"]
    body = [
        [
            f"{row['case']} / {row['arm']}",
            "average" if row["column"].startswith("average_") else "",
            _number(row.get("mean"), row.get("interval"), metric),
            "best"
            if row["mark"] == "best"
            else _number(row.get("behind"), row.get("behind_interval"), metric),
            _NOTHING if row.get("p") is None else spelled_p(row["p"]),
            f"{row['n']} of {row['asked']}",
        ]
        for row in rows_of(sweep, results, out)
    ]
    kept = [k for k in range(len(header)) if k != 1 or any(line[1] for line in body)]
    return [header[k] for k in kept], [[line[k] for k in kept] for line in body]


def _number(mean: float | None, interval: Sequence[float] | None, metric: Metric) -> str:
    if mean is None:
        return _NOTHING
    factor, digits = (100.0, 1) if metric.percent else (1.0, 4)
    half = "" if interval is None else f" ± {factor * (interval[1] - interval[0]) / 2:.{digits}f}"
    return f"{factor * mean:.{digits}f}{half}"
