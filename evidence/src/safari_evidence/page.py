"""The page of a reproduction: the paper's words next to our figures, as HTML and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from safari.errors import MissingExtraError
from safari.report.style import render, styled
from safari.runs.files import making, write_atomically
from safari.sweep import Results
from safari.sweep.results import several_versions
from safari_evidence.blocks import Block, Figure, Heading, Note, Quote, to_html, to_markdown
from safari_evidence.experiments import Experiment
from safari_evidence.figures import figures_of
from safari_evidence.tables import main_table, matrices, race, rivals, verdict_table

TITLE = "The paper's claims, run again"


def write_page(experiments: Sequence[Experiment], results: Results, out: Path, title: str = TITLE) -> Path:
    """Write report.html, report.md and the figures under `out`; returns the page.

    Without Matplotlib the page has the tables, and says how to get the figures.
    """
    blocks = list(_page(experiments, results))
    with making(out / "figures"):
        for block in blocks:
            if isinstance(block, Figure):
                for kind in ("svg", "png"):
                    path = out / "figures" / f"{block.name}.{kind}"
                    write_atomically(path, render(block.figure, kind))
    write_atomically(out / "report.md", to_markdown(title, blocks).encode())
    write_atomically(out / "report.html", to_html(title, blocks).encode())
    return out / "report.html"


def _page(experiments: Sequence[Experiment], results: Results) -> Iterator[Block]:
    yield Note(_progress(experiments, results))
    mixed = several_versions(experiments, results)
    if mixed:
        yield Note(f"{mixed} Tables have a column for it, and verdicts that rest on several name them.")
    for made_with in results.environments:
        parts = [f"{key} {value}" for key, value in made_with.items() if value is not None]
        yield Note("Made with " + ", ".join(parts) + ".")
    table = verdict_table(experiments, results)
    if table is not None:
        yield Heading("Claim by claim")
        yield table
    for experiment in experiments:
        yield from _section(experiment, results)


def _progress(experiments: Sequence[Experiment], results: Results) -> str:
    done, asked = results.progress(experiments)
    if done == asked:
        return f"All {asked} trials are finished."
    return f"{done} of {asked} trials are finished; what follows is of those alone."


def _section(experiment: Experiment, results: Results) -> Iterator[Block]:
    yield Heading(f"{experiment.name}: {experiment.title}")
    yield Quote(experiment.claim)
    if experiment.finding:
        yield Note(experiment.finding)
    averaged = all(case.config.aggregation.average for case in experiment.cases)
    for column in (experiment.score, *([f"average_{experiment.score}"] if averaged else [])):
        if "matrix" in experiment.show:
            yield from matrices(experiment, results, column)
        yield from rivals(experiment, results, column)
    reached = race(experiment, results)
    if reached is not None:
        yield reached
    yield main_table(experiment, results, folded="matrix" in experiment.show)
    try:
        with styled():
            yield from figures_of(experiment, results)
    except MissingExtraError as error:
        yield Note(str(error))
