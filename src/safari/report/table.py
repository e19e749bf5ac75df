"""The table of results: plain rows from summaries, and their text, Markdown and terminal forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from safari.runs.metrics import RunMetrics
from safari.tasks import Metric

if TYPE_CHECKING:
    from rich.table import Table

NOTHING = "–"
# What a narrow terminal can do without, the least first; further metrics stand where OTHERS does.
OTHERS = "*"
ANY_TARGET = "rounds to target"
_LESSER = ("seeds", "down", OTHERS, "up", "its wobble", "wobble", "to stay there", "loss", "lost %")


@dataclass(frozen=True)
class Value:
    """Mean and sample standard deviation over n seeds; None for what cannot be said."""

    mean: float | None
    std: float | None
    n: int

    @classmethod
    def of(cls, spread: Mapping[str, Any] | None) -> Value:
        """From an entry of a summary; None for a number that its runs do not have."""
        return cls(None, None, 0) if spread is None else cls(spread["mean"], spread["std"], spread["n"])


@dataclass(frozen=True)
class Row:
    """One arm over its seeds; shares are fractions, sizes are bytes of one message.

    `worst_client` is the score on the client that the model serves worst, where clients hold samples out.
    `scores` has the metrics by name and `metrics` describes them; `wobble`, `average` (of the running average)
    and `average_wobble` are those of the metric that is the score.
    """

    label: str
    metrics: RunMetrics
    scores: Mapping[str, Value]
    wobble: Value
    average: Value
    average_wobble: Value
    rounds_to_target: Value
    reached: str
    rounds_to_stay: Value
    stayed: str
    target: float | None
    worst_client: Value
    lost_updates: Value
    refused: Value
    bytes_up: Value
    bytes_down: Value
    seeds: int
    rounds_done: int
    rounds_asked: int


def rows_of(summaries: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """One row an arm, from `{run's name: summary}`; labels carry the run's name when there are several."""
    return [
        _row(arm if len(summaries) == 1 else f"{name}/{arm}", entry, summary)
        for name, summary in summaries.items()
        for arm, entry in summary["arms"].items()
    ]


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and texts; a column without any value is left out.

    >>> header, body = cells(rows_of({"demo": {"target": 0.85, "rounds": 2, "arms": {}}}))
    >>> header, body
    (['arm'], [])
    """
    columns: list[tuple[str, Callable[[Row], str]]] = [
        *_of_scores(rows),
        *((heading(metric), partial(_score, metric)) for metric in _others(rows)),
        (_target_heading(rows), partial(_to_target, spelled=_target_heading(rows) == ANY_TARGET)),
        (
            "to stay there",
            lambda row: f"{_spread(row.rounds_to_stay, 1, 0)} ({row.stayed})" if _aims(row) else NOTHING,
        ),
        (
            "worst client %" if all(row.metrics.main.percent for row in rows) else "worst client",
            lambda row: _number(row.worst_client, row.metrics.main),
        ),
        ("lost %", lambda row: _mean(row.lost_updates, 100, 1)),
        ("refused", lambda row: f"{row.refused.mean:.0f}" if row.refused.mean else NOTHING),
        ("up", lambda row: _bytes(row.bytes_up)),
        ("down", lambda row: _bytes(row.bytes_down)),
        ("seeds", lambda row: str(row.seeds)),
        ("progress", _progress),
    ]
    texts = [(name, [text(row) for row in rows]) for name, text in columns]
    shown = [("arm", [row.label for row in rows])] + [
        (name, column) for name, column in texts if any(text not in (NOTHING, "") for text in column)
    ]
    body = [[column[i] for _, column in shown] for i in range(len(rows))]
    return [name for name, _ in shown], body


def heading(metric: Metric) -> str:
    """The heading of a metric's column.

    >>> heading(Metric("top1", "top-1 accuracy", percent=True, short="top-1")), heading(Metric("mae", "error"))
    ('top-1 %', 'error')
    """
    return (metric.short or metric.label) + (" %" if metric.percent else "")


def _of_scores(rows: Sequence[Row]) -> list[tuple[str, Callable[[Row], str]]]:
    """For each metric that is the score of a row: itself, its wobble, the running average's."""
    scores = list(dict.fromkeys(row.metrics.main for row in rows))
    columns: list[tuple[str, Callable[[Row], str]]] = []
    for metric in scores:
        columns.append((heading(metric), partial(_score, metric)))
    average = "average %" if all(metric.percent for metric in scores) else "average"
    wobble = lambda row: _number(row.wobble, row.metrics.main, spread=False)
    average_wobble = lambda row: _number(row.average_wobble, row.metrics.main, spread=False)
    mean = lambda row: _number(row.average, row.metrics.main)
    return [*columns, ("wobble", wobble), (average, mean), ("its wobble", average_wobble)]


def _others(rows: Sequence[Row]) -> list[Metric]:
    """The metrics of any row that are not the score of one."""
    scores = {row.metrics.main.name for row in rows}
    found = {metric.name: metric for row in rows for metric in row.metrics.metrics}
    return [metric for name, metric in found.items() if name not in scores]


def _score(metric: Metric, row: Row) -> str:
    return _number(row.scores.get(metric.name, Value.of(None)), metric)


def _number(value: Value, metric: Metric, *, spread: bool = True) -> str:
    """A metric's value: percentages with one decimal, other numbers with about four figures."""
    factor = 100 if metric.percent else 1
    size = abs(value.mean or 0.0)
    digits = 1 if metric.percent else 3 if size < 10 else 2 if size < 100 else 1
    return _spread(value, factor, digits) if spread else _mean(value, factor, digits)


def to_text(rows: Sequence[Row]) -> str:
    """Columns in line, for a terminal or a log."""
    return aligned(*cells(rows))


def aligned(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Texts in columns: the first to the left, the others to the right."""
    widths = [max(len(line[k]) for line in [header, *body]) for k in range(len(header))]

    def line(texts: Sequence[str]) -> str:
        first, *rest = (
            text.ljust(width) if k == 0 else text.rjust(width)
            for k, (text, width) in enumerate(zip(texts, widths, strict=True))
        )
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(header), "  ".join("─" * w for w in widths), *map(line, body)]) + "\n"


def to_markdown(rows: Sequence[Row]) -> str:
    """A Markdown table; a bar in a name is escaped."""
    return markdown(*cells(rows))


def markdown(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Texts as a Markdown table: the first column to the left, the others to the right."""

    def line(texts: Sequence[str]) -> str:
        return "| " + " | ".join(text.replace("\\", "\\\\").replace("|", "\\|") for text in texts) + " |"

    rule = "|" + "|".join("---" if k == 0 else "---:" for k in range(len(header))) + "|"
    return "\n".join([line(header), rule, *map(line, body)]) + "\n"


def to_rich(rows: Sequence[Row], title: str | None = None, width: int | None = None) -> Table:
    """The table for a terminal; where `width` letters are too few, the lesser columns are left out."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    header, body = _fitting(*cells(rows), width, [heading(metric) for metric in _others(rows)])
    # Text, never markup: a name such as "[red]" is to be read, not obeyed.
    table = Table(
        title=Text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for k, name in enumerate(header):
        table.add_column(Text(name), justify="left" if k == 0 else "right", no_wrap=True)
    for texts in body:
        table.add_row(*(Text(text, style="bold" if k == 0 else "") for k, text in enumerate(texts)))
    return table


def explain(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Explanation of a table's numbers, in a sentence or two each.

    >>> from safari.runs.metrics import CLASSIFICATION
    >>> explain({"demo": {"last": 20, "metrics": CLASSIFICATION.to_json()}})
    'Scores are means over the evaluations of the last 20 rounds, then over the seeds (± standard \
deviation over seeds). Wobble is the standard deviation of top-1 within those rounds of one run, in points, \
without its linear trend and any difference between even and odd rounds.'
    """
    lasts = sorted({summary["last"] for summary in summaries.values()})
    metrics = [RunMetrics.from_json(summary["metrics"]) for summary in summaries.values()]
    names = " or ".join(dict.fromkeys(found.main.short or found.main.label for found in metrics))
    points = ", in points" if all(found.main.percent for found in metrics) else ""
    averaged = any(
        Value.of(arm.get(f"average_{found.score}")).n
        for summary, found in zip(summaries.values(), metrics, strict=True)
        for arm in summary.get("arms", {}).values()
    )
    return (
        f"Scores are means over the evaluations of the last {' or '.join(map(str, lasts))} rounds, then over "
        f"the seeds (± standard deviation over seeds). Wobble is the standard deviation of {names} within "
        f"those rounds of one run{points}, without its linear trend and any difference between even and "
        "odd rounds."
    ) + (f" Average: {names} of the running average of the global models." if averaged else "")


def warnings_of(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Warnings that results are meaningless, with the run's name where there are several runs.

    >>> warnings_of({"demo": {"warnings": ["drop: no update ever arrived"]}})
    ['drop: no update ever arrived']
    """
    several = len(summaries) > 1
    return [
        f"{name}/{warning}" if several else warning
        for name, summary in summaries.items()
        for warning in summary["warnings"]
    ]


def human_bytes(count: float) -> str:
    """A number of bytes in decimal units, with three figures.

    >>> human_bytes(999), human_bytes(1234567), human_bytes(45.6e9), human_bytes(999_999)
    ('999 B', '1.23 MB', '45.6 GB', '1.00 MB')
    """
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while count >= 999.5 and len(units) > 1:
        count, units = count / 1000, units[1:]
    digits = 0 if units[0] == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {units[0]}"


def _fitting(
    header: list[str], body: list[list[str]], width: int | None, others: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """The columns that fit; `others` are the headings of metrics that are not the score."""
    lines = [header, *body]
    further = [name for name in others if name not in _LESSER]
    for name in (name for lesser in _LESSER for name in (further if lesser == OTHERS else (lesser,))):
        needed = sum(max(map(len, column)) + 3 for column in zip(*lines, strict=True)) - 3
        if width is None or needed <= width:
            break
        if name in header:
            k = header.index(name)
            lines = [line[:k] + line[k + 1 :] for line in lines]
            header = lines[0]
    return lines[0], lines[1:]


def _row(label: str, entry: Mapping[str, Any], summary: Mapping[str, Any]) -> Row:
    seeds, metrics = list(entry["seeds"].values()), RunMetrics.from_json(summary["metrics"])
    return Row(
        label=label,
        metrics=metrics,
        scores={name: Value.of(entry.get(name)) for name in metrics.names},
        wobble=Value.of(entry.get(f"{metrics.score}_wobble")),
        average=Value.of(entry.get(f"average_{metrics.score}")),
        average_wobble=Value.of(entry.get(f"average_{metrics.score}_wobble")),
        rounds_to_target=Value.of(entry["rounds_to_target"]),
        reached=entry["reached_target"],
        rounds_to_stay=Value.of(entry["rounds_to_stay"]),
        stayed=entry["stayed_at_target"],
        target=summary["target"],
        worst_client=Value.of(entry.get("clients_worst")),
        lost_updates=Value.of(entry["lost_updates"]),
        refused=Value.of(entry.get("refused")),
        bytes_up=Value.of(entry["bytes_up"]),
        bytes_down=Value.of(entry["bytes_down"]),
        seeds=len(seeds),
        rounds_done=sum(seed["rounds"] for seed in seeds),
        rounds_asked=summary["rounds"] * summary["seeds"],
    )


def _aims(row: Row) -> bool:
    return row.seeds > 0 and row.target is not None


def _goal(target: float, metric: Metric) -> str:
    return f"{100 * target:.4g} %" if metric.percent else f"{target:.4g}"


def _target_heading(rows: Sequence[Row]) -> str:
    goals = {_goal(row.target, row.metrics.main) for row in rows if row.target is not None}
    return f"rounds to {goals.pop()}" if len(goals) == 1 else ANY_TARGET


def _mean(value: Value, factor: float, digits: int) -> str:
    return NOTHING if value.mean is None else f"{factor * value.mean:.{digits}f}"


def _spread(value: Value, factor: float, digits: int) -> str:
    mean = _mean(value, factor, digits)
    return mean if value.mean is None or value.std is None else f"{mean} ± {factor * value.std:.{digits}f}"


def _to_target(row: Row, *, spelled: bool) -> str:
    if row.target is None or not row.seeds:
        return NOTHING
    goal = f"{_goal(row.target, row.metrics.main)}: " if spelled else ""
    return f"{goal}{_spread(row.rounds_to_target, 1, 0)} ({row.reached})"


def _bytes(value: Value) -> str:
    return human_bytes(value.mean) if value.mean else NOTHING


def _progress(row: Row) -> str:
    if row.rounds_done >= row.rounds_asked:
        return ""
    return f"{row.rounds_done} of {row.rounds_asked} rounds" if row.rounds_done else "not begun"
