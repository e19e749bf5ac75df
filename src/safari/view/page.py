"""The page itself: its files for a server, or everything frozen into one."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from safari.runs import RunFolder
from safari.runs.files import making, write_atomically
from safari.view.monitor import Monitor

FILE = "report.html"

_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
_STATIC = files("safari.view").joinpath("static")
# The only names that are ever served: nothing of a request becomes a path.
FILES = {
    item.name: _TYPES[Path(item.name).suffix]
    for item in sorted(_STATIC.iterdir(), key=lambda item: item.name)
    if Path(item.name).suffix in _TYPES
}

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

# What one file may weigh: details and snapshots beyond this stay with `safari view`.
MOST_DETAIL_CELLS = 4_000_000
MOST_SNAPSHOT_NUMBERS = 1_000_000

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z]+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:const|let|class|function|async function) )", re.MULTILINE)


@cache
def read_file(name: str) -> bytes:
    """A file of the page."""
    return _STATIC.joinpath(name).read_bytes()


def live_page() -> bytes:
    """The page for a server."""
    return read_file("index.html")


@cache
def bundle() -> str:
    """All modules in one, each after those that it needs; their names do not collide (a test sees to it)."""
    done: list[str] = []
    texts: dict[str, str] = {}

    def visit(name: str) -> None:
        if name in texts:
            return
        text = texts[name] = read_file(f"{name}.js").decode()
        for other in _IMPORT.findall(text):
            visit(other)
        done.append(name)

    visit("main")
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", texts[name])) for name in done)


def write_report(runs: Sequence[RunFolder], out: Path, rules: Mapping[str, str] | None = None) -> Path:
    """Write one page about a run, or about several overlaid, and return its path.

    `out` is the file, or a folder that is to hold `report.html`. `rules` says in a line what each rule
    does, by the rule's name.
    """
    path = out / FILE if out.is_dir() or not out.suffix else out
    with making(path.parent):
        write_atomically(path, frozen_page(runs, rules).encode())
    return path


def frozen_page(runs: Sequence[RunFolder], rules: Mapping[str, str] | None = None) -> str:
    """The page with its data, scripts and style in it: it needs no server and fetches nothing."""
    style, script = read_file("style.css").decode(), bundle()
    # "</script" inside the text would end the tag.
    data = json.dumps(freeze(runs, rules), allow_nan=False).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    icon = base64.b64encode(read_file("mark.svg")).decode()
    head = {
        '<meta charset="utf-8">\n': '<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n',
        'href="static/mark.svg"': f'href="data:image/svg+xml;base64,{icon}"',
        '<link rel="stylesheet" href="static/style.css">': f"<style>{style}</style>",
        '<script type="module" src="static/main.js"></script>\n': "",
        "</body>": f'<script type="application/json" id="frozen">{data}</script>\n'
        f'<script type="module">{script}</script>\n</body>',
    }
    page = live_page().decode()
    for old, new in head.items():
        before, found, after = page.partition(old)
        assert found, old
        page = before + new + after
    return page


def freeze(runs: Sequence[RunFolder], rules: Mapping[str, str] | None = None) -> dict[str, Any]:
    """All data that a server would send to the page, as far as it fits into one file."""
    monitor = Monitor(runs, rules)
    while monitor.poll():
        pass
    trials, _ = monitor.since({})
    snapshots: dict[str, dict[str, Any]] = {}
    for key, trial in trials.items():
        found = _snapshots(monitor, key)
        snapshots[key] = {str(round): snapshot for round, snapshot in found.items()}
        if len(found) < len(trial["snapshots"]):
            trial["snapshots_note"] = (
                f"This file holds {len(found)} of {len(trial['snapshots'])} snapshots; safari view shows all."
            )
            trial["snapshots"] = list(found)
    return {
        "runs": monitor.describe(),
        "trials": trials,
        "table": monitor.table(),
        "details": _details(monitor, trials),
        "snapshots": snapshots,
    }


def _details(monitor: Monitor, trials: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Details of the trials, first seeds first, until the file would become too large."""
    found: dict[str, Any] = {}
    cells = 0
    first_seeds = sorted(trials, key=lambda key: (trials[key]["seed"], trials[key]["run"]))
    for key in first_seeds:
        detail = monitor.detail(key)
        cells += detail["length"] * (detail["clients"] + len(detail["layers"]))
        if cells > MOST_DETAIL_CELLS and found:
            break
        found[key] = detail
    return found


def _snapshots(monitor: Monitor, key: str) -> dict[int, Any]:
    """The snapshots of a trial, evenly thinned out, the first and the last among them."""
    rounds = monitor.snapshot_rounds(key)
    if not rounds:
        return {}
    last = monitor.snapshot(key, rounds[-1])
    fitting = max(2, MOST_SNAPSHOT_NUMBERS // last["clients"] ** 2)
    if len(rounds) > fitting:
        rounds = [rounds[round(k * (len(rounds) - 1) / (fitting - 1))] for k in range(fitting)]
    return {number: monitor.snapshot(key, number) for number in rounds}


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
