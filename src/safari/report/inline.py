"""A Matplotlib SVG made fit for a page: unique ids, no style sheet, the page's colours."""

from __future__ import annotations

import re
from html import escape

from safari.report.style import GRID, INK, PALETTE, SOFT

# Colours that the page names, so that a dark page can choose others.
VARIABLES = {INK: "--ink", SOFT: "--soft", GRID: "--grid", "#ffffff": "--paper"} | {
    shade: f"--line-{k}" for k, shade in enumerate(PALETTE) if k > 0
}

_HEAD = re.compile(r"^.*?<svg\b[^>]*?viewBox=\"([^\"]+)\"[^>]*>", re.DOTALL)
_DROPPED = re.compile(r"<!--.*?-->|<metadata>.*?</metadata>|<style\b.*?</style>", re.DOTALL)
_IDS = re.compile(r"(\bid=\"|href=\"#|url\(#)")
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")


def inline_svg(svg: bytes, prefix: str, label: str) -> str:
    """The picture as an element of an HTML page; `prefix` keeps its ids apart from other pictures'."""
    text = svg.decode("utf-8")
    head = _HEAD.match(text)
    if head is None:
        raise ValueError("not an SVG file of Matplotlib's: it has no viewBox")
    body = _DROPPED.sub("", text[head.end() :])
    body = _IDS.sub(lambda match: match[1] + prefix, body)
    body = _COLOUR.sub(
        lambda match: f"var({VARIABLES[match[0]]})" if match[0] in VARIABLES else match[0], body
    )
    body = re.sub(r"\n\s*", "\n", body).strip()
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="{escape(head[1])}">{body}'
