"""The figures, one function each: plain data in, a Matplotlib Figure out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from safari.report.gather import Codes, Flags, Floats, LayerData, Series
from safari.report.style import (
    PALETTE,
    SOFT,
    End,
    colour,
    dash,
    label_ends,
    new_figure,
    starts_of,
    styled,
    thin,
)
from safari.runs import ClientStatus
from safari.text import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Beyond these, names at the lines' ends would leave too little space for the lines: a legend is better.
MOST_DIRECT_LABELS = 8
LONGEST_DIRECT_LABEL = 19
MOST_CELLS_WITH_NUMBERS = 12
# More than this cannot be distinguished on a page: rounds are then taken together in blocks.
MOST_ROUNDS_ONE_BY_ONE = 300
MOST_BLOCKS = 100
MOST_NAMED_LAYERS = 24
_LONGEST_NAME = 60
FEW_POINTS = 25

# Off by one from the palette: lines may change their colour on a dark page, pixels cannot.
_STATUS = {
    ClientStatus.ARRIVED: "#0072b3",
    ClientStatus.LOST: "#bdbdbd",
    ClientStatus.LOST_UP: "#bdbdbd",
    ClientStatus.LOST_DOWN: "#7f7f7f",
    ClientStatus.REFUSED: "#d55e01",
    ClientStatus.NOT_ASKED: "#ffffff",
}
_STOOD_IN = "#f5d08a"
_DEAD = "#d55e01"

_UNKNOWN: dict[str, Any] = {"facecolor": "#ffffff", "edgecolor": "#a8a8a8", "hatch": "/////"}


def curves(
    lines: Sequence[Series], ylabel: str, *, percent: bool = False, target: float | None = None
) -> Figure:
    """Lines against rounds: the mean over seeds, in a band of ± one standard deviation.

    Long lines are drawn by blocks of evaluations: then mean and deviation are over seeds and the block.
    `percent` shows fractions as percentages; `target` is drawn where the lines come near it.
    """
    factor = 100.0 if percent else 1.0
    with styled():
        figure = new_figure(6.0, 3.3)
        axes = figure.add_subplot()
        for k, line in enumerate(lines):
            rounds, mean, std = in_blocks(line)
            look = _look(k, line)
            _plot(axes, look, rounds, factor * mean)
            if std.any():
                band = factor * (mean - std), factor * (mean + std)
                axes.fill_between(rounds, *band, color=colour(look), alpha=0.16, linewidth=0)
        _finish(axes, lines, ylabel)
        if percent:
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, 0.0), min(high, 101.0))
        if target is not None:
            _mark_target(axes, factor * target, "%" if percent else "")
        _name_lines(
            figure, axes, lines, [_end(k, line, factor * in_blocks(line)[1]) for k, line in enumerate(lines)]
        )
        return figure


def in_blocks(line: Series) -> tuple[Floats, Floats, Floats]:
    """Rounds, mean and sample standard deviation of what is drawn: evaluations, or blocks of them.

    >>> line = Series("a", np.arange(1.0, 3.0), np.array([[1.0, 2.0], [3.0, 2.0]]), seeds=2)
    >>> [part.round(3).tolist() for part in in_blocks(line)]
    [[1.0, 2.0], [2.0, 2.0], [1.414, 0.0]]
    """
    count = len(line.rounds)
    if count <= MOST_ROUNDS_ONE_BY_ONE:
        return line.rounds, line.mean, line.std
    cuts = starts_of(count, MOST_BLOCKS)[1:]
    parts = np.split(line.values, cuts, axis=1)
    return (
        np.array([part.mean() for part in np.split(line.rounds, cuts)]),
        np.array([part.mean() for part in parts]),
        np.array([part.std(ddof=1) if part.size > 1 else 0.0 for part in parts]),
    )


def masks(density: Sequence[Series], support: Sequence[Series], churn: Sequence[Series]) -> Figure:
    """Density of the client masks, support of the global model, and its churn in each round."""
    with styled():
        figure = new_figure(9.0, 2.8)
        panels: Any = figure.subplots(1, 3)
        titles = ("kept by a client", "not 0 in the global model", "changed in the round")
        for axes, title, lines in zip(panels, titles, (density, support, churn), strict=True):
            _draw_exact(axes, lines, 100.0)
            _finish(axes, lines, "prunable weights (%)" if lines is density else "")
            axes.set_title(title)
            _from_zero(axes, lines, 100.0)
        _legend_below(figure, support)
        return figure


def traffic(up: Sequence[Series], down: Sequence[Series], dense: Sequence[float]) -> Figure:
    """Bytes of a message, up and down, next to those of a dense float32 model.

    Points, not lines: they are counted now and then, and what lies between is not known.
    """
    with styled():
        figure = new_figure(9.0, 3.1)
        panels: Any = figure.subplots(1, 2)
        both = (("up: client to server", up), ("down: server to client", down))
        for axes, (title, lines) in zip(panels, both, strict=True):
            factor, unit = _unit(max([*dense, *(float(s.mean.max()) for s in lines)], default=0.0))
            for size in dense:
                axes.axhline(factor * size, color=SOFT, lw=1.2, ls=(0, (4, 2)))
            _draw_points(axes, lines, factor)
            _finish(axes, lines, f"{unit} a message")
            axes.set_title(title)
            axes.set_ylim(bottom=0.0)
            ends = [_end(k, line, factor * line.mean) for k, line in enumerate(lines)]
            ends += [End("dense", factor * size, SOFT) for size in dense[:1]]
            _name_lines(figure, axes, lines, ends)
        return figure


def layers(data: LayerData) -> Figure:
    """Density of each layer over the rounds, its churn, and for how many rounds its weights stay.

    A layer at 0 is dead and has a colour of its own; what the records do not say is hatched.
    """
    with styled():
        from matplotlib.patches import Patch

        figure = new_figure(9.0, min(5.2, 1.7 + 0.2 * len(data.names)))
        panels: Any = figure.subplots(1, 3, width_ratios=(3, 3, 1.4), sharey=True)
        density, churn, life = panels
        dead = data.density == 0
        cells = np.where(dead, np.nan, data.density)
        _layer_cells(figure, density, data.rounds, 100 * cells, "kept (%)", (0.0, 100.0), dead)
        most = float(np.nanmax(data.churn[1:], initial=0.0)) if len(data.churn) > 1 else 0.0
        shown = np.where(data.churn > 0, data.churn, np.where(np.isnan(data.churn), np.nan, 0.0))
        _layer_cells(figure, churn, data.rounds, 100 * shown, "changed (%)", (0.0, 100 * most or 1.0))
        for axes, title in ((density, "density"), (churn, "churn")):
            axes.set_title(title)
            axes.set_xlabel("round")
            _whole_rounds(axes)
        _lives(life, data.life)
        count = len(data.names)
        density.set_ylim(count - 0.5, -0.5)
        few = count <= MOST_NAMED_LAYERS
        density.set_yticks(range(count) if few else range(0, count, max(1, count // 10)))
        names = [visible(data.names[k], _LONGEST_NAME) if few else str(k + 1) for k in density.get_yticks()]
        density.set_yticklabels(names, parse_math=False)
        for axes in panels:
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0)
        if dead.any():
            handle = Patch(facecolor=_DEAD)
            figure.legend([handle], ["dead: nothing of the layer is left"], loc="outside lower center")
        return figure


def similarity(matrix: Floats) -> Figure:
    """Similarities of all pairs of clients, as the server estimates them; unknown pairs are hatched."""
    with styled():
        from matplotlib.patches import Patch, Rectangle

        clients = len(matrix)
        figure = new_figure(4.6, 4.1)
        axes = figure.add_subplot()
        shown = np.array(matrix, dtype=np.float64)
        np.fill_diagonal(shown, np.nan)
        extent = (-0.5, clients - 0.5, clients - 0.5, -0.5)
        axes.add_patch(Rectangle((-0.5, -0.5), clients, clients, zorder=0, linewidth=0, **_UNKNOWN))
        image = axes.imshow(np.ma.masked_invalid(shown), cmap="cividis", interpolation="none", extent=extent)
        # Each client with itself says nothing, and its value would swallow the scale.
        itself = np.zeros((clients, clients, 4))
        itself[np.arange(clients), np.arange(clients)] = (0.91, 0.91, 0.91, 1.0)
        axes.imshow(itself, interpolation="none", extent=extent)
        _client_ticks(axes.xaxis, clients)
        _client_ticks(axes.yaxis, clients)
        axes.set(xlabel="client", ylabel="client")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        unknown = np.isnan(shown) & ~np.eye(clients, dtype=bool)
        if np.isfinite(shown).any():
            bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02)
            bar.set_label("similarity (larger: more alike)")
            bar.outline.set_visible(False)
        if unknown.any():
            figure.legend(
                [Patch(linewidth=0.6, **_UNKNOWN)], ["never arrived together"], loc="outside lower center"
            )
        return figure


def arrivals(status: Codes, stood_in: Flags) -> Figure:
    """Which updates arrived: a row a client, a column a round. With many rounds, the share that arrived.

    Args:
        status: what became of each client, as `ClientStatus`.
        stood_in: where another client stood in; of the same shape.
    """
    with styled():
        clients, rounds = status.shape
        figure = new_figure(9.0, min(5.2, 1.5 + 0.16 * clients))
        axes = figure.add_subplot()
        extent = (0.5, rounds + 0.5, clients - 0.5, -0.5)
        if rounds <= MOST_ROUNDS_ONE_BY_ONE:
            _status_cells(figure, axes, status, stood_in, extent)
        else:
            _status_shares(figure, axes, status, extent)
        _client_ticks(axes.yaxis, clients)
        axes.set(xlabel="round", ylabel="client")
        _whole_rounds(axes)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        return figure


def label_counts(counts: NDArray[np.int64]) -> Figure:
    """Training samples of each class at each client."""
    with styled():
        clients, classes = counts.shape
        figure = new_figure(min(9.0, 2.6 + 0.36 * clients), min(5.0, 1.5 + 0.24 * classes))
        axes = figure.add_subplot()
        extent = (-0.5, clients - 0.5, classes - 0.5, -0.5)
        most = max(1, int(counts.max()))
        image = axes.imshow(
            counts.T, cmap="Blues", vmin=0, vmax=most, interpolation="none", aspect="auto", extent=extent
        )
        if max(clients, classes) <= MOST_CELLS_WITH_NUMBERS:
            for (client, label), count in np.ndenumerate(counts):
                if count:
                    # Not the ink: these stand on blue, on a dark page too.
                    shade = "#fefefe" if count > 0.68 * most else "#1a1a1b"
                    axes.text(client, label, f"{count}", ha="center", va="center", color=shade, fontsize=7.5)
        else:
            bar = figure.colorbar(image, ax=axes, pad=0.015)
            bar.set_label("samples")
            bar.outline.set_visible(False)
        _client_ticks(axes.xaxis, clients)
        _client_ticks(axes.yaxis, classes)
        axes.set(xlabel="client", ylabel="class")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        return figure


def by_class(arms: Sequence[str], names: Sequence[str], accuracy: Floats) -> Figure:
    """Accuracy of each class, a row an arm: one sees which classes an arm has forgotten.

    `accuracy[arm, class]` is a fraction; NaN where a class has no test samples.
    """
    with styled():
        rows, classes = accuracy.shape
        longest = max(map(len, arms))
        figure = new_figure(min(9.0, 1.6 + 0.08 * longest + 0.46 * classes), 0.9 + 0.34 * rows)
        axes = figure.add_subplot()
        shown = np.ma.masked_invalid(100.0 * accuracy)
        axes.imshow(shown, cmap="Blues", vmin=0, vmax=100, interpolation="none", aspect="auto")
        if classes <= MOST_CELLS_WITH_NUMBERS:
            for (row, label), value in np.ndenumerate(100.0 * accuracy):
                if np.isfinite(value):
                    # Not the ink: these stand on blue, on a dark page too.
                    shade = "#fefefe" if value > 68 else "#1a1a1b"
                    axes.text(label, row, f"{value:.0f}", ha="center", va="center", color=shade, fontsize=8)
        axes.set_yticks(range(rows), [visible(arm, _LONGEST_NAME) for arm in arms])
        every = max(1, -(-classes // 20))
        axes.set_xticks(range(0, classes, every), [visible(name, _LONGEST_NAME) for name in names[::every]])
        axes.set(xlabel="class", title="test accuracy by class (%)")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        return figure


def _look(k: int, line: Series) -> int:
    return k if line.look is None else line.look


def _plot(axes: Axes, look: int, rounds: Floats, values: Floats, width: float = 1.5) -> None:
    marker: Mapping[str, Any] = {"marker": "o", "ms": 3} if len(rounds) <= FEW_POINTS else {}
    axes.plot(rounds, values, color=colour(look), ls=dash(look), lw=width, **marker)


def _draw_exact(axes: Axes, lines: Sequence[Series], factor: float) -> None:
    """Means, thinned out. Arms often coincide here: the lower lines are wider, so that all can be seen."""
    step = min(1.0, 3.6 / max(1, len(lines) - 1))
    for k, line in enumerate(lines):
        at = thin(len(line.rounds), MOST_ROUNDS_ONE_BY_ONE)
        width = 1.4 + step * (len(lines) - 1 - k)
        _plot(axes, _look(k, line), line.rounds[at], factor * line.mean[at], width)


def _draw_points(axes: Axes, lines: Sequence[Series], factor: float) -> None:
    """Means as points, thinned out. The points of the first lines are larger, so that all can be seen."""
    step = min(1.5, 5.0 / max(1, len(lines) - 1))
    for k, line in enumerate(lines):
        at, size = thin(len(line.rounds), MOST_ROUNDS_ONE_BY_ONE), 3.0 + step * (len(lines) - 1 - k)
        shade = colour(_look(k, line))
        axes.plot(line.rounds[at], factor * line.mean[at], color=shade, ls="", marker="o", ms=size, mew=0)


def _from_zero(axes: Axes, lines: Sequence[Series], factor: float) -> None:
    """Scale the y axis from 0 to above the lines; a first round far above the rest becomes an annotation."""
    first = max((float(np.nan_to_num(s.mean[0])) for s in lines if len(s.rounds)), default=0.0)
    rest = max((float(np.nan_to_num(s.mean[1:]).max(initial=0.0)) for s in lines), default=0.0)
    top, room = max(first, rest), 1.12
    if first > 3 * rest and any(len(s.rounds) > 1 for s in lines):
        top, room = rest, 1.3
        axes.annotate(
            f"round 1: {factor * first:.3g} %", xy=(1, 1), xycoords="axes fraction", xytext=(0, -2),
            textcoords="offset points", va="top", ha="right", fontsize=8, color=SOFT,
        )  # fmt: skip
    axes.set_ylim(0.0, room * factor * top if top > 0 else 1.0)


def _finish(axes: Axes, lines: Sequence[Series], ylabel: str) -> None:
    axes.set(xlabel="round", ylabel=ylabel)
    axes.grid(axis="y")
    last = max((float(s.rounds[-1]) for s in lines if len(s.rounds)), default=1.0)
    axes.set_xlim(0.0, last if last > 1 else 2.0)
    _whole_rounds(axes)
    if not any(len(s.rounds) for s in lines):
        axes.tick_params(labelbottom=False, labelleft=False)
        axes.text(0.5, 0.5, "nothing recorded yet", transform=axes.transAxes, ha="center", color=SOFT)


def _mark_target(axes: Axes, target: float, unit: str) -> None:
    low, high = axes.get_ylim()
    if low <= target <= high:
        axes.axhline(target, color=SOFT, lw=0.9, ls=(0, (1, 2)), zorder=1)
        axes.annotate(
            f"target {target:.4g} {unit}".rstrip(), xy=(0.0, target), xycoords=("axes fraction", "data"),
            xytext=(4, 2), textcoords="offset points", color=SOFT, fontsize=8, va="bottom",
        )  # fmt: skip


def _end(k: int, line: Series, drawn: Floats) -> End:
    """Label of a line's end, at the height of its last number, because a line may end in a gap."""
    finite = drawn[np.isfinite(drawn)]
    return End(_name(line), float(finite[-1]) if len(finite) else float("nan"), colour(_look(k, line)))


def _name_lines(figure: Figure, axes: Axes, lines: Sequence[Series], ends: Sequence[End]) -> None:
    """Names at the lines' ends, if they are few and short and the lines end together; else a legend."""
    together = len({float(line.rounds[-1]) for line in lines if len(line.rounds)}) <= 1
    short = all(len(end.name) <= LONGEST_DIRECT_LABEL for end in ends)
    if together and short and len(lines) <= MOST_DIRECT_LABELS:
        label_ends(figure, axes, ends)
    else:
        label_ends(figure, axes, ends[len(lines) :])
        _legend_below(figure, lines)


def _legend_below(figure: Figure, lines: Sequence[Series]) -> None:
    from matplotlib.lines import Line2D

    if figure.legends or not lines:
        return
    names = [_name(line) for line in lines]
    # A letter is about 0.075 inches wide, a line with its space like eight of them.
    fits = int(float(figure.get_size_inches()[0]) / (0.075 * (8 + max(map(len, names)))))
    looks = [_look(k, line) for k, line in enumerate(lines)]
    handles = [Line2D([], [], color=colour(look), ls=dash(look), lw=1.8) for look in looks]
    # Matplotlib drops names that begin with an underscore, so they are put in afterwards.
    placeholders = [str(k) for k in range(len(lines))]
    legend = figure.legend(
        handles, placeholders, loc="outside lower center", ncols=max(1, min(fits, len(lines)))
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)


def _name(line: Series) -> str:
    here = len(line.values)
    return line.label if here == line.seeds else f"{line.label} ({here} of {line.seeds} seeds)"


def _unit(most: float) -> tuple[float, str]:
    for factor, unit in ((1e-9, "GB"), (1e-6, "MB"), (1e-3, "kB")):
        if most * factor >= 1.0:
            return factor, unit
    return 1.0, "bytes"


def _whole_rounds(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}".replace(",", "\u202f")))


def _client_ticks(axis: Any, count: int) -> None:
    from matplotlib.ticker import FixedLocator, MaxNLocator

    axis.set_major_locator(
        FixedLocator(range(count)) if count <= 20 else MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10])
    )


def _layer_cells(
    figure: Figure,
    axes: Axes,
    rounds: Floats,
    values: Floats,
    label: str,
    limits: tuple[float, float],
    dead: Flags | None = None,
) -> None:
    """`values[k, l]` as a picture, a row a layer; many rounds are taken together in blocks."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    starts = starts_of(len(rounds), MOST_ROUNDS_ONE_BY_ONE)
    sizes = np.diff(np.append(starts, len(rounds)))[:, None]
    means = np.add.reduceat(values, starts, axis=0) / sizes
    extent = (rounds[0] - 0.5, rounds[-1] + 0.5, values.shape[1] - 0.5, -0.5)
    corner, wide = (extent[0], -0.5), extent[1] - extent[0]
    axes.add_patch(Rectangle(corner, wide, values.shape[1], zorder=0, linewidth=0, **_UNKNOWN))
    image = axes.imshow(
        np.ma.masked_invalid(means.T), cmap="cividis", vmin=limits[0], vmax=limits[1], aspect="auto",
        interpolation="none", extent=extent,
    )  # fmt: skip
    if dead is not None and dead.any():
        cells = np.zeros((values.shape[1], len(starts), 4))
        cells[np.logical_and.reduceat(dead, starts, axis=0).T] = to_rgba(_DEAD)
        axes.imshow(cells, aspect="auto", interpolation="none", extent=extent)
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    bar.set_label(label)
    bar.outline.set_visible(False)


def _lives(axes: Axes, lives: Floats) -> None:
    """Mean lives as bars; those that are longer than the run are unknown."""
    axes.set_title("life of weights")
    known = np.isfinite(lives)
    axes.barh(np.flatnonzero(known), lives[known], color=PALETTE[2], height=0.7)
    if known.any():
        axes.set_xlabel("rounds")
    else:
        axes.set_xticks([])
        axes.text(0.5, 0.5, "longer than\nthe run", transform=axes.transAxes, ha="center", color=SOFT)


def _status_cells(
    figure: Figure, axes: Axes, status: Codes, stood_in: Flags, extent: tuple[float, float, float, float]
) -> None:
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Patch

    colours = np.zeros((len(ClientStatus), 4))
    for code, shade in _STATUS.items():
        colours[code] = to_rgba(shade, alpha=0.0 if code == ClientStatus.NOT_ASKED else 1.0)
    cells = colours[status]
    cells[stood_in] = to_rgba(_STOOD_IN)
    axes.imshow(cells, interpolation="none", aspect="auto", extent=extent)
    clients, rounds = status.shape
    if clients <= 40:
        for y in np.arange(0.5, clients - 1):
            axes.axhline(y, color="#ffffff", lw=1.2)
    if rounds <= 60:
        for x in np.arange(1.5, rounds):
            axes.axvline(x, color="#ffffff", lw=0.8)
    alone = status[~stood_in]
    legend = [(code.label, shade) for code, shade in _STATUS.items() if (alone == code).any()]
    legend = [entry for entry in legend if entry[0] != ClientStatus.NOT_ASKED.label]
    if stood_in.any():
        legend.insert(1 if (alone == ClientStatus.ARRIVED).any() else 0, ("another stood in", _STOOD_IN))
    if legend:
        figure.legend(
            [Patch(facecolor=shade) for _, shade in legend], [name for name, _ in legend],
            loc="outside upper left", ncols=len(legend), handlelength=1.0, handleheight=1.0,
            columnspacing=1.4,
        )  # fmt: skip


def _status_shares(
    figure: Figure, axes: Axes, status: Codes, extent: tuple[float, float, float, float]
) -> None:
    starts = starts_of(status.shape[1], MOST_ROUNDS_ONE_BY_ONE)
    width = int(starts[1] - starts[0])
    asked = np.add.reduceat((status != ClientStatus.NOT_ASKED).astype(np.float64), starts, axis=1)
    arrived = np.add.reduceat((status == ClientStatus.ARRIVED).astype(np.float64), starts, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = 100.0 * arrived / asked
    # The last block may be narrower than the others, and the picture has to end with it.
    whole = (extent[0], extent[0] + width * share.shape[1], extent[2], extent[3])
    image = axes.imshow(
        np.ma.masked_invalid(share), cmap="Blues", vmin=0, vmax=100, interpolation="none", aspect="auto",
        extent=whole,
    )  # fmt: skip
    axes.set_xlim(extent[0], extent[1])
    bar = figure.colorbar(image, ax=axes, pad=0.015)
    bar.set_label(f"arrived in {width} rounds (%)")
    bar.outline.set_visible(False)
