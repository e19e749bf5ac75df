"""One self-contained page, and the figures as files."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from html import escape
from itertools import count
from pathlib import Path
from typing import Any

from safari.config import Config
from safari.errors import MissingExtraError
from safari.report.gallery import Drawn, draw_all
from safari.report.gather import RunData, read_run, run_names
from safari.report.inline import inline_svg
from safari.report.sheet import STYLE
from safari.report.style import render, styled
from safari.report.table import cells, explain, rows_of
from safari.report.track import shareable
from safari.runs import RunFolder, summarise
from safari.runs.files import making, write_atomically
from safari.toml import to_toml
from safari.version import __version__

FILE = "report.html"


def write_report(runs: Sequence[RunFolder], out: Path, rules: Mapping[str, str] | None = None) -> Path:
    """Write one page about a run, or about several overlaid, and return its path.

    `out` is the file, or a folder that is to hold `report.html`. `rules` says in a line what each rule
    does, by the rule's name. Without Matplotlib the page has the table and says how to get the figures.
    """
    path = out / FILE if out.is_dir() or not out.suffix else out
    names = run_names(runs)
    summaries = {name: summarise(run) for name, run in zip(names, runs, strict=True)}
    data = [read_run(run, name) for name, run in zip(names, runs, strict=True)]
    body = [_header(data), _results(summaries), *_figures(data), _arms(data, rules or {})]
    body += [_environment(run, len(data) > 1) for run in data if run.environment]
    body += [_config(run, len(data) > 1) for run in data]
    body.append(f"<footer>safari-fl {escape(__version__)}</footer>")
    with making(path.parent):
        write_atomically(path, _document(" and ".join(names), body).encode())
    return path


def write_figures(runs: RunFolder | Sequence[RunFolder], folder: Path) -> list[Path]:
    """Write every figure as PNG and SVG into a folder, and return the paths.

    MissingExtraError without Matplotlib, before anything is written.
    """
    several = [runs] if isinstance(runs, RunFolder) else list(runs)
    with styled():
        data = [read_run(run, name) for run, name in zip(several, run_names(several), strict=True)]
    paths = list[Path]()
    with making(folder):
        for drawn in draw_all(data):
            whose = "" if drawn.run is None or len(data) == 1 else f"{drawn.run}-"
            stem = _stem(whose + drawn.name, {path.stem.casefold() for path in paths})
            for kind in ("png", "svg"):
                path = folder / f"{stem}.{kind}"
                write_atomically(path, render(drawn.figure, kind))
                paths.append(path)
    return paths


def _stem(name: str, taken: Set[str]) -> str:
    """A file's name that is safe in any file system and not taken: a run's may come from its folder's.

    >>> _stem("my run #2-labels", {"labels"}), _stem("Top1", {"top1", "top1-2"})
    ('my-run-2-labels', 'Top1-3')
    """
    safe = re.sub(r"[^A-Za-z0-9._+]+", "-", name).lstrip(".-") or "figure"
    numbered = (safe if n == 1 else f"{safe}-{n}" for n in count(1))
    return next(stem for stem in numbered if stem.casefold() not in taken)


def _document(title: str, body: Iterable[str]) -> str:
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    # Nothing may be fetched or run. The pictures carry style attributes and images as data.
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; style-src-elem 'sha256-{digest}'; "
        "style-src-attr 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>SAFARI: {escape(title)}</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            "<main>",
            *body,
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _header(runs: Sequence[RunData]) -> str:
    lines = ["<header>", f"<h1>{escape(' and '.join(run.name for run in runs))}</h1>"]
    for run in runs:
        name = f"<b>{escape(run.name)}</b> · " if len(runs) > 1 else ""
        lines.append(f"<p>{name}{escape(_setting(run.config))}</p>")
    return "\n".join([*lines, "</header>"])


def _setting(config: Config) -> str:
    clients = f"{config.clients} clients"
    if config.cohort:
        clients += f", {config.cohort} asked in a round"
    parts = [
        clients,
        f"{config.data.name} ({config.partition.name})",
        config.model.name,
        f"{config.pruning.pruner} at {100 * config.pruning.sparsity:.4g} % sparsity",
        f"uplink {config.uplink.name}",
        *([f"downlink {config.downlink.name}"] if config.downlink.name != "perfect" else []),
        f"{config.rounds} rounds",
        f"{config.seeds} seed" + "s" * (config.seeds > 1),
    ]
    return " · ".join(parts)


def _results(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    header, body = cells(rows_of(summaries))
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in header)
    rows = [
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(text)}</td>" for text in rest)
        + "</tr>"
        for first, *rest in body
    ]
    table = f'<div class="scroll"><table class="numbers"><thead><tr>{head}</tr></thead><tbody>'
    note = f'<p class="note">{escape(explain(summaries))}</p>'
    return _section("Results", [table, *rows, "</tbody></table></div>", note])


def _figures(runs: Sequence[RunData]) -> list[str]:
    try:
        with styled():
            drawn = [(figure, _figure(figure, k)) for k, figure in enumerate(draw_all(runs))]
    except MissingExtraError as error:
        return [f'<section><h2>Figures</h2><p class="missing">{escape(str(error))}</p></section>']
    together = [text for figure, text in drawn if figure.run is None]
    sections = [_section("Figures", together)] if together else []
    for run in runs:
        own = [text for figure, text in drawn if figure.run == run.name]
        if own and len(runs) > 1:
            sections.append(_details(f"Clients of {run.name}", own))
        elif own:
            sections.append(_section("Clients", own))
    return sections


def _figure(drawn: Drawn, number: int) -> str:
    svg = inline_svg(render(drawn.figure, "svg", transparent=True), f"f{number}-", drawn.title)
    width = float(drawn.figure.get_size_inches()[0])
    kind = "wide" if width > 7 else "small"
    words = f"<b>{escape(drawn.title)}</b> {escape(drawn.caption)}"
    return (
        f'<figure class="{kind}"><figcaption>{words}</figcaption>'
        f'<div class="scroll" style="--natural: {120 * width:.0f}px">{svg}</div></figure>'
    )


def _arms(runs: Sequence[RunData], rules: Mapping[str, str]) -> str:
    rows = []
    for run in runs:
        for arm in run.config.arms:
            name = arm.name if len(runs) == 1 else f"{run.name}/{arm.name}"
            options = ", ".join(f"{key} = {value!r}" for key, value in arm.rule.options.items())
            rule = f"<code>{escape(arm.rule.name)}</code>" + (f" ({escape(options)})" if options else "")
            about = escape(rules.get(arm.rule.name, ""))
            rows.append(f'<tr><th scope="row">{escape(name)}</th><td>{rule}</td><td>{about}</td></tr>')
    head = "".join(f'<th scope="col">{text}</th>' for text in ("arm", "rule", ""))
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>'
    return _section("Arms: what the server does about the missing", [table, *rows, "</tbody></table></div>"])


def _environment(run: RunData, several: bool) -> str:
    rows = [
        f'<tr><th scope="row">{escape(str(key))}</th><td>{escape(str(value))}</td></tr>'
        for key, value in run.environment.items()
    ]
    table = ['<div class="scroll"><table><tbody>', *rows, "</tbody></table></div>"]
    return _section("Made with" + (f": {run.name}" if several else ""), table)


def _config(run: RunData, several: bool) -> str:
    title = "Configuration" + (f" of {run.name}" if several else "")
    return _details(title, [f"<pre><code>{escape(to_toml(shareable(run.config)))}</code></pre>"])


def _section(title: str, body: Sequence[str]) -> str:
    return "\n".join(["<section>", f"<h2>{escape(title)}</h2>", *_grid(body), "</section>"])


def _details(title: str, body: Sequence[str]) -> str:
    return "\n".join(["<details>", f"<summary>{escape(title)}</summary>", *_grid(body), "</details>"])


def _grid(body: Sequence[str]) -> list[str]:
    if not body or not body[0].startswith("<figure"):
        return list(body)
    return ['<div class="grid">', *body, "</div>"]
