"""The table of results: plain rows from summaries, and their text, Markdown and terminal forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

NOTHING = "–"
# What a narrow terminal can do without, the least first.
_LESSER = ("seeds", "down", "top-5 %", "up", "its wobble", "wobble", "to stay there", "loss", "lost %")


@dataclass(frozen=True)
class Value:
    """Mean and sample standard deviation over n seeds; None for what cannot be said."""

    mean: float | None
    std: float | None
    n: int

    @classmethod
    def of(cls, spread: Mapping[str, Any] | None) -> Value:
        """From an entry of a summary; None where one of an earlier version has no such entry."""
        return cls(None, None, 0) if spread is None else cls(spread["mean"], spread["std"], spread["n"])


@dataclass(frozen=True)
class Row:
    """One arm over its seeds; accuracies and shares are fractions, sizes are bytes of one message."""

    label: str
    top1: Value
    wobble: Value
    average: Value
    average_wobble: Value
    top5: Value
    loss: Value
    rounds_to_target: Value
    reached: str
    rounds_to_stay: Value
    stayed: str
    target: float
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
    """Headings and texts; a column in which no row has anything to say is left out.

    >>> header, body = cells(rows_of({"demo": {"target": 0.85, "rounds": 2, "arms": {}}}))
    >>> header, body
    (['arm'], [])
    """
    targets = {row.target for row in rows}
    target = f"rounds to {_percent(targets.pop())} %" if len(targets) == 1 else "rounds to target"
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("top-1 %", lambda row: _spread(row.top1, 100, 1)),
        ("wobble", lambda row: _mean(row.wobble, 100, 1)),
        ("average %", lambda row: _spread(row.average, 100, 1)),
        ("its wobble", lambda row: _mean(row.average_wobble, 100, 1)),
        ("top-5 %", lambda row: _spread(row.top5, 100, 1)),
        ("loss", lambda row: _spread(row.loss, 1, 3)),
        (target, lambda row: _to_target(row, spelled=target == "rounds to target")),
        (
            "to stay there",
            lambda row: f"{_spread(row.rounds_to_stay, 1, 0)} ({row.stayed})" if row.seeds else NOTHING,
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


def to_text(rows: Sequence[Row]) -> str:
    """Columns in line, for a terminal or a log."""
    header, body = cells(rows)
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
    header, body = cells(rows)

    def line(texts: Sequence[str]) -> str:
        return "| " + " | ".join(text.replace("\\", "\\\\").replace("|", "\\|") for text in texts) + " |"

    rule = "|" + "|".join("---" if k == 0 else "---:" for k in range(len(header))) + "|"
    return "\n".join([line(header), rule, *map(line, body)]) + "\n"


def to_rich(rows: Sequence[Row], title: str | None = None, width: int | None = None) -> Table:
    """The table for a terminal; where `width` letters are too few, the lesser columns are left out."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    header, body = _fitting(*cells(rows), width)
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
    """What the numbers mean, in a sentence or two each.

    >>> explain({"demo": {"last": 20}})
    'Scores are means over the evaluations of the last 20 rounds, then over the seeds (± standard \
deviation over seeds). Wobble is the standard deviation of top-1 within those rounds of one run, in points, \
without its linear trend and any difference between even and odd rounds.'
    """
    lasts = sorted({summary["last"] for summary in summaries.values()})
    arms = [arm for summary in summaries.values() for arm in summary.get("arms", {}).values()]
    averaged = any(Value.of(arm.get("average_top1")).n for arm in arms)
    return (
        f"Scores are means over the evaluations of the last {' or '.join(map(str, lasts))} rounds, then over "
        "the seeds (± standard deviation over seeds). Wobble is the standard deviation of top-1 within "
        "those rounds of one run, in points, without its linear trend and any difference between even and "
        "odd rounds."
    ) + (" Average: top-1 of the running average of the global models." if averaged else "")


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
    header: list[str], body: list[list[str]], width: int | None
) -> tuple[list[str], list[list[str]]]:
    lines = [header, *body]
    for name in _LESSER:
        needed = sum(max(map(len, column)) + 3 for column in zip(*lines, strict=True)) - 3
        if width is None or needed <= width:
            break
        if name in header:
            k = header.index(name)
            lines = [line[:k] + line[k + 1 :] for line in lines]
            header = lines[0]
    return lines[0], lines[1:]


def _row(label: str, entry: Mapping[str, Any], summary: Mapping[str, Any]) -> Row:
    seeds = list(entry["seeds"].values())
    return Row(
        label=label,
        top1=Value.of(entry["top1"]),
        wobble=Value.of(entry.get("top1_wobble")),
        average=Value.of(entry.get("average_top1")),
        average_wobble=Value.of(entry.get("average_top1_wobble")),
        top5=Value.of(entry["top5"]),
        loss=Value.of(entry["loss"]),
        rounds_to_target=Value.of(entry["rounds_to_target"]),
        reached=entry["reached_target"],
        rounds_to_stay=Value.of(entry["rounds_to_stay"]),
        stayed=entry["stayed_at_target"],
        target=summary["target"],
        lost_updates=Value.of(entry["lost_updates"]),
        refused=Value.of(entry.get("refused")),
        bytes_up=Value.of(entry["bytes_up"]),
        bytes_down=Value.of(entry["bytes_down"]),
        seeds=len(seeds),
        rounds_done=sum(seed["rounds"] for seed in seeds),
        rounds_asked=summary["rounds"] * summary.get("seeds", max(1, len(seeds))),
    )


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.4g}"


def _mean(value: Value, factor: float, digits: int) -> str:
    return NOTHING if value.mean is None else f"{factor * value.mean:.{digits}f}"


def _spread(value: Value, factor: float, digits: int) -> str:
    mean = _mean(value, factor, digits)
    return mean if value.mean is None or value.std is None else f"{mean} ± {factor * value.std:.{digits}f}"


def _to_target(row: Row, *, spelled: bool) -> str:
    if not row.seeds:
        return NOTHING
    goal = f"{_percent(row.target)} %: " if spelled else ""
    return f"{goal}{_spread(row.rounds_to_target, 1, 0)} ({row.reached})"


def _bytes(value: Value) -> str:
    return human_bytes(value.mean) if value.mean else NOTHING


def _progress(row: Row) -> str:
    if row.rounds_done >= row.rounds_asked:
        return ""
    return f"{row.rounds_done} of {row.rounds_asked} rounds" if row.rounds_done else "not begun"
