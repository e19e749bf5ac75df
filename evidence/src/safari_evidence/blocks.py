"""A page as a list of blocks, which become HTML or Markdown: the text is written once."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from safari.report.inline import inline_svg
from safari.report.sheet import STYLE
from safari.report.style import render
from safari.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


@dataclass(frozen=True)
class Heading:
    """The title of a section."""

    text: str


@dataclass(frozen=True)
class Quote:
    """The paper's words."""

    text: str


@dataclass(frozen=True)
class Note:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Table:
    """Texts in rows; the first `names` columns are names. `**x**` is bold and `*x*` italic.

    `folded`: long, so hidden until it is opened. `numbers`: the other columns are aligned to the right.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    folded: bool = False
    numbers: bool = True
    names: int = 1


@dataclass(frozen=True)
class Figure:
    """A figure with its caption; `name` is that of its file in the folder figures."""

    name: str
    title: str
    caption: str
    figure: Drawing


Block = Heading | Quote | Note | Table | Figure

_EXTRA = """
blockquote { margin: 0 0 1rem; padding: .1rem 1rem; border-left: 3px solid var(--line-2); max-width: 46rem; }
td.words { text-align: left; white-space: normal; }
"""


def to_markdown(title: str, blocks: Sequence[Block]) -> str:
    """The page in Markdown; figures are separate files."""
    parts = [f"# {title}"]
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"## {block.text}")
        elif isinstance(block, Quote):
            parts.append("\n".join(f"> {line}" for line in block.text.splitlines()))
        elif isinstance(block, Note):
            parts.append(block.text)
        elif isinstance(block, Table):
            parts += [markdown_table(block), *([block.note] if block.note else [])]
        else:
            parts += [f"![{block.title}](figures/{block.name}.svg)", f"*{block.title}. {block.caption}*"]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """A table alone, without its note."""

    def line(texts: Sequence[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"

    right = "---:" if table.numbers else "---"
    rule = "|" + "|".join("---" if k < table.names else right for k in range(len(table.header))) + "|"
    return "\n".join([line(table.header), rule, *map(line, table.rows)])


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """The page in one file: nothing is fetched, nothing is run."""
    style = STYLE + _EXTRA
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; style-src-elem 'sha256-{digest}'; "
        "style-src-attr 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>SAFARI: {escape(title)}</title>",
        f"<style>{style}</style></head>",
        f"<body><main><header><h1>{escape(title)}</h1></header>",
    ]
    return "\n".join(
        [*head, *_html(blocks), f"<footer>safari-fl {escape(__version__)}</footer></main></body></html>", ""]
    )


def _html(blocks: Sequence[Block]) -> list[str]:
    parts, grid = [], False
    for number, block in enumerate(blocks):
        # Figures that follow each other stand side by side.
        if isinstance(block, Figure) != grid:
            grid = isinstance(block, Figure)
            parts.append('<div class="grid">' if grid else "</div>")
        if isinstance(block, Heading):
            parts.append(f"<h2>{escape(block.text)}</h2>")
        elif isinstance(block, Quote):
            parts.append(f"<blockquote><p>{escape(block.text)}</p></blockquote>")
        elif isinstance(block, Note):
            parts.append(f'<p class="note">{escape(block.text)}</p>')
        elif isinstance(block, Table):
            parts.append(_html_table(block))
        else:
            parts.append(_html_figure(block, number))
    return [*parts, *(["</div>"] if grid else [])]


def _html_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in table.header)
    lines = []
    for row in table.rows:
        names = "".join(f'<th scope="row">{_rich(text)}</th>' for text in row[: table.names])
        kind = "" if table.numbers else ' class="words"'
        lines.append(
            f"<tr>{names}{''.join(f'<td{kind}>{_rich(text)}</td>' for text in row[table.names :])}</tr>"
        )
    body = (
        f'<div class="scroll"><table{" class=" + chr(34) + "numbers" + chr(34) if table.numbers else ""}>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        + (f'<p class="note">{escape(table.note)}</p>' if table.note else "")
    )
    return f"<details><summary>All numbers</summary>{body}</details>" if table.folded else body


def _html_figure(block: Figure, number: int) -> str:
    svg = inline_svg(render(block.figure, "svg", transparent=True), f"e{number}-", block.title)
    width = float(block.figure.get_size_inches()[0])
    words = f"<b>{escape(block.title)}</b> {escape(block.caption)}"
    return (
        f'<figure class="{"wide" if width > 7 else "small"}"><figcaption>{words}</figcaption>'
        f'<div class="scroll" style="--natural: {120 * width:.0f}px">{svg}</div></figure>'
    )


def _rich(text: str) -> str:
    """Bold and italic, and nothing else.

    >>> _rich("**1 < 2**"), _rich("*x*"), _rich("a*b")
    ('<b>1 &lt; 2</b>', '<i>x</i>', 'a*b')
    """
    safe = escape(text)
    safe = re.sub(r"^\*\*(.+)\*\*$", r"<b>\1</b>", safe)
    return re.sub(r"^\*([^*].*)\*$", r"<i>\1</i>", safe)
