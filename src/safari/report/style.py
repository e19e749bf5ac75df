"""Style of figures: colours, fonts, labels at the lines' ends; and their rendering to bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from safari.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1a1a1a"
SOFT = "#6b6b6b"
GRID = "#e3e3e3"
# Okabe and Ito's palette, distinct for all kinds of colour vision; black is the ink, and yellow is left
# out because it cannot be seen on white.
PALETTE = (INK, "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)))

# A look is a place in both: colours first, then dashes. Each built-in rule has one, in every figure and on the page;
# rules of one family share a colour.
RULE_LOOKS = {
    "perfect": 0, "drop": 1, "safari": 2, "safari+": 3, "mifa": 4, "fedau": 5, "stale": 6,
    "attainable": 7, "known-p": 8, "fdms": 9, "blue": 10, "fedvarp": 11, "few": 13,
    "cluster-fedvarp": 18, "geometric-median": 19, "trimmed-mean": 20, "fedstale": 25, "majority-vote": 26,
}  # fmt: skip

_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "path",
    # Fixed, so that the same data give the same bytes.
    "svg.hashsalt": "safari",
    # A name with a dollar sign is a name, not mathematics.
    "text.parse_math": False,
}


# A column of a paper and two, in inches, with letters that are read at that size; fonts are embedded as they are.
_COLUMN, _TWO_COLUMNS = 3.35, 7.0
_PAPER_RC = {
    "font.size": 7.0,
    "axes.titlesize": 7.0,
    "axes.labelsize": 7.0,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "pdf.fonttype": 42,
}
_paper = ContextVar("paper", default=False)


@contextmanager
def for_paper() -> Iterator[None]:
    """Context in which figures are one column of a paper wide, those of several panels two."""
    token = _paper.set(True)
    try:
        yield
    finally:
        _paper.reset(token)


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib with this style, for making and for saving; MissingExtraError where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plots", "figures") from error
    # Start from Matplotlib's own defaults: a user's matplotlibrc must not change what is drawn.
    settings: dict[Any, Any] = {**matplotlib.rcParamsDefault, **_RC, **(_PAPER_RC if _paper.get() else {})}
    del settings["backend"]
    with matplotlib.rc_context(settings):
        yield


def looks_of(rules: Sequence[str]) -> list[int]:
    """A look for each arm, by the names of their rules: further arms of a rule have its colour with other dashes.

    Rules without a look of their own take those that no built-in needs here, in their order.

    >>> looks_of(["drop", "perfect", "mine.py:rule", "safari+", "safari+"])
    [1, 0, 4, 3, 10]
    """
    most = len(PALETTE) * len(DASHES)
    found: dict[int, int] = {}
    for wanted in (True, False):
        for k, rule in enumerate(rules):
            first = RULE_LOOKS.get(rule)
            if (first is not None) != wanted:
                continue
            own = range(first, most, len(PALETTE)) if first is not None else range(4, most)
            free = (look for look in (*own, *range(most)) if look not in found.values())
            found[k] = next(free, k % most)
    return [found[k] for k in range(len(rules))]


def colour(index: int) -> str:
    """The colour of the index-th line."""
    return PALETTE[index % len(PALETTE)]


def dash(index: int) -> Any:
    """The dashes of the index-th line: solid until the colours have been used up."""
    return DASHES[index // len(PALETTE) % len(DASHES)]


def thin(count: int, most: int) -> NDArray[np.intp]:
    """Which of `count` points to draw: all, or evenly chosen ones with the first and the last.

    >>> thin(5, most=9).tolist(), thin(9, most=3).tolist()
    ([0, 1, 2, 3, 4], [0, 4, 8])
    """
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.intp))


def starts_of(count: int, most: int) -> NDArray[np.intp]:
    """First indices of blocks of equal width (the last may be narrower), at most `most` of them.

    >>> starts_of(5, most=3).tolist(), starts_of(3, most=3).tolist()
    ([0, 2, 4], [0, 1, 2])
    """
    return np.arange(0, count, max(1, math.ceil(count / most)))


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones, in their order, at least `gap` apart and inside [low, high] if they fit.

    >>> spread_out([0.5, 0.5, 0.9], gap=0.1, low=0.0, high=1.0)
    [0.45, 0.55, 0.9]
    """
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    # Neighbours that touch become one group that sits around its own mean.
    groups: list[list[int]] = []

    def edges(group: list[int]) -> tuple[float, float]:
        half = gap * (len(group) - 1) / 2
        centre = sum(wanted[i] for i in group) / len(group)
        centre = max(low + half, min(high - half, centre))
        return centre - half, centre + half

    for i in order:
        groups.append([i])
        while len(groups) > 1 and edges(groups[-1])[0] - edges(groups[-2])[1] < gap - 1e-9:
            last = groups.pop()
            groups[-1] += last
    places = [0.0] * len(wanted)
    for group in groups:
        start = edges(group)[0]
        for k, i in enumerate(group):
            places[i] = round(start + k * gap, 9)
    return places


@dataclass(frozen=True)
class End:
    """End of a line: its height in data coordinates, and its label."""

    name: str
    y: float
    colour: str


def label_ends(figure: Figure, axes: Axes, ends: Sequence[End]) -> None:
    """Write names right of the axes, where the lines end, and never one over another.

    The axes' limits must be final.
    """
    size = 6.5 if _paper.get() else 8.5
    low, high = axes.get_ylim()
    shown = [end for end in ends if math.isfinite(end.y)]
    at = [min(1.0, max(0.0, (end.y - low) / (high - low))) for end in shown]
    height = 72.0 * float(figure.get_size_inches()[1])
    places = spread_out(at, gap=1.45 * size / (0.8 * height), low=0.0, high=1.0)
    for end, here, place in zip(shown, at, places, strict=True):
        axes.annotate(
            end.name,
            xy=(1.005, here),
            xytext=(1.045, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            ha="left",
            color=INK,
            fontsize=size,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": end.colour,
                "linewidth": 1.8,
                "shrinkA": 1,
                "shrinkB": 0,
                "capstyle": "butt",
                "relpos": (0.0, 0.5),
            },
        )


def new_figure(width: float, height: float) -> Figure:
    """An empty figure without a window and without global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if _paper.get():
        column = _COLUMN if width <= _TWO_COLUMNS else _TWO_COLUMNS
        width, height = column, max(2.0, 1.1 * column * height / width)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


# What Matplotlib would write into a file besides the figure: the date, and its own version.
_METADATA = {"png": ("Software",), "svg": ("Date", "Creator"), "pdf": ("CreationDate", "Creator", "Producer")}


def render(figure: Figure, kind: Literal["png", "svg", "pdf"], *, transparent: bool = False) -> bytes:
    """The figure as a file's bytes: the same figure always gives the same bytes."""
    buffer = io.BytesIO()
    with styled():
        metadata: dict[str, Any] = dict.fromkeys(_METADATA[kind])
        figure.savefig(buffer, format=kind, dpi=150, transparent=transparent, metadata=metadata)
    return buffer.getvalue()
