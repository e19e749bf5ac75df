"""`safari.run` and `safari.resume`: what the command line does, from Python.

The engine's own functions of these names compute and write records, and say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

import click

from safari import engine
from safari.aggregation import RULES
from safari.config import Config
from safari.engine import Watcher
from safari.plugins import first_line
from safari.report.live import LiveChart, in_notebook
from safari.report.progress import Progress
from safari.runs import RunFolder
from safari.runs.code import described
from safari.view import write_report


def run(
    config: Config | Mapping[str, Any] | str | Path,
    out: str | Path | None = None,
    watchers: Sequence[Watcher] = (),
    *,
    progress: bool = True,
    report: bool = True,
    overwrite: bool = False,
    trust: bool = False,
) -> dict[str, Any]:
    """Run an experiment: every arm and seed, then a page; returns the summary, as in `summary.json`.

    Args:
        config: tables, a `Config`, or the path of a TOML file.
        out: the run's folder, new or empty; by default `runs/NAME-DATE-TIME`.
        watchers: told of every round besides: a tracker, or your own (docs/runs.md).
        progress: show how it goes, and the engine's notes: bars on a terminal, lines elsewhere (both on standard
            error), a chart below the cell in a notebook.
        report: write `report.html` into the folder at the end.
        overwrite: replace a run that the folder holds; what is not a run's own file is never removed.
        trust: use the code and the addresses that a TOML file names, although somebody else may have written it;
            tables are your own, and what a file names that you have run before stays in use until it changes.

    >>> import tempfile
    >>> small = {"rounds": 2, "arms": ["drop"], "clients": 5, "model": {"name": "mlp"}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = run(small, f"{folder}/first", progress=False)
    >>> summary["arms"]["drop"]["seeds"]["0"]["rounds"]
    2
    """
    folder = new_folder(engine.as_config(config).name) if out is None else Path(out)
    told = [*_shown(progress), *watchers]
    summary = engine.run(config, folder, told, overwrite=overwrite, trust=trust)
    return _reported(folder, summary, report, progress)


def resume(
    path: str | Path,
    watchers: Sequence[Watcher] = (),
    *,
    from_round: int | None = None,
    progress: bool = True,
    report: bool = True,
    trust: bool = False,
) -> dict[str, Any]:
    """Go on with a run that was interrupted; a finished one is only summarised again.

    Args:
        path: the run's folder.
        watchers: told of every round, also of those that are done.
        from_round: go back to the state after this round first; it must have a checkpoint
            (`checkpoint.keep`). What is later is kept in `cut-N` beside the records.
        progress: as in `run`.
        report: as in `run`.
        trust: use the code and the addresses that the folder's config names; `TrustError` otherwise, unless you
            have made the run yourself, and neither its config nor the code has changed since.
    """
    told = [*_shown(progress), *watchers]
    summary = engine.resume(path, told, from_round=from_round, trust=trust)
    return _reported(Path(path), summary, report, progress)


def new_folder(name: str) -> Path:
    """runs/NAME-DATE-TIME, numbered when another run began in the same second."""
    first = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    others = (first.with_name(f"{first.name}-{number}") for number in count(2))
    return next(folder for folder in chain([first], others) if not folder.exists())


def rule_lines(runs: Sequence[RunFolder]) -> dict[str, str]:
    """Description of each arm's rule, in a line. A user's own rules are in the run: none is imported."""
    lines: dict[str, str] = {}
    for run in runs:
        said = described(run)
        for name in {arm.rule.name for arm in run.config.arms}:
            lines[name] = first_line(RULES[name]) if name in RULES else said.get(name, "")
    return lines


def _shown(progress: bool) -> list[Watcher]:
    if not progress:
        return []
    return [LiveChart() if in_notebook() else Progress()]


def _reported(folder: Path, summary: dict[str, Any], report: bool, progress: bool) -> dict[str, Any]:
    for warning in summary["warnings"] if progress else ():
        click.echo(f"warning: {warning}", err=True)
    if report:
        runs = [RunFolder.open(folder)]
        write_report(runs, folder / "report.html", rules=rule_lines(runs))
    return summary
