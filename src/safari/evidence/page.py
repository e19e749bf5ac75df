"""The page of a reproduction: the paper's words beside our figures, as HTML and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from safari.errors import MissingExtraError
from safari.evidence.blocks import Block, Figure, Heading, Note, Quote, Table, to_html, to_markdown
from safari.evidence.book import Book, column
from safari.evidence.compare import Cell, cells, judge, paired, reference_of, scale
from safari.evidence.numbers import Numbers
from safari.evidence.pictures import Picture, pictures
from safari.evidence.plan import Case, Experiment
from safari.report.style import render, styled
from safari.runs.files import making, write_atomically

TITLE = "The paper's claims, run again"
NOTHING = "–"
_MEANS_ALONE = ("top1_within", "average_top1_within", "lost_updates")
_COLUMNS = {
    "top1": "top-1 %",
    "top1_within": "wobble",
    "average_top1": "top-1 of the average %",
    "average_top1_within": "its wobble",
    "top5": "top-5 %",
    "loss": "loss",
    "rounds_to_target": "rounds to target",
    "rounds_to_stay": "to stay there",
    "right_group": "right group %",
    "phi": "φ",
    "error": "error",
    "lost_updates": "lost %",
}
MINUS = "minus perfect"
# Columns beside which stands the difference to the arm in which nothing is lost.
_GAPS = ("top1", "average_top1")


def write_page(experiments: Sequence[Experiment], book: Book, out: Path) -> Path:
    """Write report.html, report.md and the figures under `out`; returns the page.

    Without Matplotlib the page has the tables, and says how to get the figures.
    """
    blocks = list(_page(experiments, book))
    with making(out / "figures"):
        for block in blocks:
            if isinstance(block, Figure):
                for kind in ("svg", "png"):
                    path = out / "figures" / f"{block.name}.{kind}"
                    write_atomically(path, render(block.figure, kind))
    write_atomically(out / "report.md", to_markdown(TITLE, blocks).encode())
    write_atomically(out / "report.html", to_html(TITLE, blocks).encode())
    return out / "report.html"


def _page(experiments: Sequence[Experiment], book: Book) -> Iterator[Block]:
    yield Note(_progress(experiments, book))
    for made_with in book.environments:
        parts = [f"{key} {value}" for key, value in made_with.items() if value is not None]
        yield Note("Made with " + ", ".join(parts) + ".")
    yield from _claims(experiments, book)
    for experiment in experiments:
        yield from _section(experiment, book)


def _progress(experiments: Sequence[Experiment], book: Book) -> str:
    done, asked = book.progress(experiments)
    if done == asked:
        return f"All {asked} trials are finished."
    return f"{done} of {asked} trials are finished; what follows is of those alone."


def _claims(experiments: Sequence[Experiment], book: Book) -> Iterator[Block]:
    rows = []
    for experiment in experiments:
        for check in experiment.checks:
            verdict = judge(check, experiment, book)
            ours = "; ".join(f"{case}: {text}" for case, text in verdict.ours.items()) or NOTHING
            rows.append([experiment.name, check.says, verdict.status, ours])
    if rows:
        yield Heading("Claim by claim")
        yield Table(
            ["experiment", "claim", "verdict", "our figures"],
            rows,
            "A difference is ours minus the other, seed by seed: mean ± standard error.",
            numbers=False,
        )


def _section(experiment: Experiment, book: Book) -> Iterator[Block]:
    yield Heading(f"{experiment.name}: {experiment.title}")
    yield Quote(experiment.claim)
    if experiment.finding:
        yield Note(experiment.finding)
    if "matrix" in experiment.show:
        yield from _matrices(experiment, book)
    yield _table(experiment, book, folded="matrix" in experiment.show)
    try:
        with styled():
            for picture in pictures(experiment, book):
                yield _figure(experiment, picture)
    except MissingExtraError as error:
        yield Note(str(error))


def _figure(experiment: Experiment, picture: Picture) -> Figure:
    return Figure(f"{experiment.name}-{picture.name}", picture.title, picture.caption, picture.figure)


def _matrices(experiment: Experiment, book: Book) -> Iterator[Table]:
    """A table for each value of all axes but the last, whose values are the columns: arms are the rows."""
    parts: dict[tuple[str, ...], list[Case]] = {}
    for case in experiment.cases:
        parts.setdefault(case.values[:-1], []).append(case)
    arms = list(dict.fromkeys(arm.name for case in experiment.cases for arm in case.config.arms))
    unranked = ", ".join(name for name in experiment.unranked if name in arms)
    note = (
        "Top-1 in per cent. Bold: the best. Italic: behind it by at most one standard error of the "
        "difference, by paired seeds." + (f" Not ranked: {unranked}." if unranked else "")
    )
    for k, (values, cases) in enumerate(parts.items(), 1):
        columns = [cells(case, book, unranked=experiment.unranked) for case in cases]
        rows = [[arm, *(_cell(found.get(arm)) for found in columns)] for arm in arms]
        header = [" · ".join(values), *(case.values[-1] if case.values else case.name for case in cases)]
        yield Table(header, rows, note if k == len(parts) else "")


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return NOTHING
    spread = f"{100 * cell.mean:.1f}" + ("" if cell.std is None else f" ± {100 * cell.std:.1f}")
    return {"best": f"**{spread}**", "tied": f"*{spread}*", "": spread}[cell.mark]


def _table(experiment: Experiment, book: Book, folded: bool) -> Table:
    rows = []
    for case in experiment.cases:
        reference = reference_of(case)
        for arm in case.config.arms:
            trials = book.arm(case, arm)
            other = book.arm(case, reference) if reference and arm != reference else {}
            row = [case.name, arm.name]
            for name in _COLUMNS:
                row += [_spread(trials, name), *([_gap(trials, other, name)] if name in _GAPS else [])]
            rows.append([*row, f"{len(trials)} of {case.config.seeds}"])
    titles = [t for name, title in _COLUMNS.items() for t in (title, *([MINUS] if name in _GAPS else []))]
    header = ["case", "arm", *titles, "seeds"]
    kept = [k for k in range(len(header)) if k < 3 or any(row[k] != NOTHING for row in rows)]
    note = (
        f"{_lengths(experiment.cases)} Scores are means over the evaluations of those last rounds, then mean "
        "± standard deviation over seeds. Wobble: standard deviation of top-1 within those rounds, in "
        "points. Minus perfect: points, seed by seed, ± standard error."
    )
    return Table(
        [header[k] for k in kept], [[row[k] for k in kept] for row in rows], note, folded=folded, names=2
    )


def _lengths(cases: Sequence[Case]) -> str:
    """How long the cases run, by which rounds they are judged and what their target is; once if all alike."""
    names: dict[str, list[str]] = {}
    for case in cases:
        last, target = case.config.evaluation.last, case.config.evaluation.target
        text = f"{case.config.rounds} rounds, the last {last} count, target {100 * target:g} % top-1"
        names.setdefault(text, []).append(case.name)
    if len(names) == 1:
        return f"{next(iter(names))}."
    return " ".join(f"{', '.join(of)}: {text}." for text, of in names.items())


def _gap(trials: dict[int, Numbers], other: dict[int, Numbers], name: str) -> str:
    gap = paired(trials, other, name)
    if gap is None:
        return NOTHING
    return f"{100 * gap.mean:+.1f}" + ("" if gap.error is None else f" ± {100 * gap.error:.1f}")


def _spread(trials: dict[int, Numbers], name: str) -> str:
    spread = column(trials, name)
    if spread["mean"] is None:
        return NOTHING
    factor, _ = scale(name)
    digits = 0 if name.startswith("rounds") else 3 if name in ("loss", "phi", "error") else 1
    text = f"{factor * spread['mean']:.{digits}f}"
    if spread["std"] is not None and name not in _MEANS_ALONE:
        text += f" ± {factor * spread['std']:.{digits}f}"
    short = f" ({spread['n']} of {len(trials)})" if spread["n"] < len(trials) else ""
    return text + short
