from __future__ import annotations

import subprocess
import sys
import warnings
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safari.errors import MissingExtraError
from safari.report import figures
from safari.report.gather import LayerData, Series
from safari.report.style import PALETTE, render, spread_out, thin
from safari.runs import ClientStatus

UNKNOWN = np.nan
# A busy machine is no failure.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def line(label, values, every=1, seeds=None):
    values = np.atleast_2d(np.asarray(values, dtype=np.float64))
    rounds = np.arange(1, values.shape[1] + 1, dtype=np.float64) * every
    return Series(label, rounds, values, len(values) if seeds is None else seeds)


def data(artist):
    return np.asarray(artist.get_xdata()).tolist(), np.asarray(artist.get_ydata()).tolist()


def texts(axes):
    return [text.get_text() for text in axes.texts]


def drawn(figure):
    """Saved once, so that everything has its place; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert render(figure, "svg").startswith(b"<?xml")
    return figure


def test_curves_draw_means_in_percent_and_name_the_lines():
    lines = [line("drop", [[0.25, 0.5], [0.75, 0.5]]), line("safari", [[0.5, 1.0], [0.5, 1.0]])]
    (axes,) = drawn(figures.curves(lines, "top-1 (%)", percent=True)).axes
    assert [data(artist) for artist in axes.lines] == [([1, 2], [50, 50]), ([1, 2], [50, 100])]
    assert [artist.get_color() for artist in axes.lines] == list(PALETTE[:2])
    assert texts(axes) == ["drop", "safari"]
    assert axes.get_ylabel() == "top-1 (%)"


def test_band_is_one_deviation_and_only_with_seeds():
    (axes,) = figures.curves([line("a", [[1.0, 4.0], [3.0, 4.0]]), line("b", [[1.0, 2.0]])], "loss").axes
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.min() == pytest.approx(2.0 - np.sqrt(2.0))
    assert heights.max() == pytest.approx(4.0)


@pytest.mark.parametrize(("target", "shown"), [(0.5, True), (0.99, False)])
def test_target_is_drawn_where_the_lines_come_near(target, shown):
    (axes,) = figures.curves([line("a", [0.1, 0.6])], "top-1", percent=True, target=target).axes
    assert ("target 50 %" in texts(axes)) is shown
    assert len(axes.lines) == 1 + shown


def test_long_lines_are_drawn_in_blocks():
    values = np.arange(5000.0)
    (axes,) = drawn(figures.curves([line("a", values)], "loss")).axes
    rounds, means = data(axes.lines[0])
    # 100 blocks of 50 rounds; the first holds rounds 1 to 50 with the values 0 to 49.
    assert len(rounds) == 100
    assert (rounds[0], means[0]) == (25.5, 24.5)
    (band,) = axes.collections
    assert band.get_paths()[0].vertices[:, 1].min() == pytest.approx(24.5 - np.arange(50).std(ddof=1))


@pytest.mark.parametrize("lines", [[("a", 100), ("b", 40)], [("a-name-of-nineteen--", 9), ("b", 9)]])
def test_lines_of_unlike_lengths_or_with_long_names_have_a_legend(lines):
    figure = drawn(figures.curves([line(name, np.ones(count)) for name, count in lines], "loss"))
    assert texts(figure.axes[0]) == []
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [name for name, _ in lines]


def test_names_say_how_many_seeds_are_still_to_come():
    (axes,) = figures.curves([line("drop", [[1.0], [2.0]], seeds=5)], "loss").axes
    assert texts(axes) == ["drop (2 of 5 seeds)"]


def test_many_lines_have_a_legend_with_every_name():
    names = ["_hidden", *(f"arm{k}" for k in range(9))]
    figure = drawn(figures.curves([line(name, [0.0, k]) for k, name in enumerate(names)], "loss"))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names
    styles = {(a.get_color(), a.get_linestyle()) for a in figure.axes[0].lines}
    assert len(styles) == len(names)


@pytest.mark.parametrize("values", [np.empty((1, 0)), [[np.nan, np.nan]], [[0.5]], [[0.5, np.nan, 0.7]]])
def test_curves_with_hardly_any_points(values):
    figure = drawn(figures.curves([line("a", values)], "loss", percent=True, target=0.85))
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), 100 * np.asarray(values)[0])


def test_nothing_at_all_says_so():
    assert texts(drawn(figures.curves([], "loss")).axes[0]) == ["nothing recorded yet"]


def test_names_are_never_mathematics():
    (axes,) = drawn(figures.curves([line("$x^2$ and $", [1.0, 2.0])], "loss")).axes
    assert not axes.texts[0].get_parse_math()


NOT_ASKED, ARRIVED, REFUSED = ClientStatus.NOT_ASKED, ClientStatus.ARRIVED, ClientStatus.REFUSED
LOST_UP = ClientStatus.LOST_UP


def test_arrivals_cell_by_cell():
    status = np.array([[ARRIVED, LOST_UP, LOST_UP], [REFUSED, NOT_ASKED, ARRIVED]], dtype=np.uint8)
    stood_in = np.array([[False, False, True], [False] * 3])
    figure = drawn(figures.arrivals(status, stood_in))
    cells = figure.axes[0].images[0].get_array()
    assert cells.shape == (2, 3, 4)
    assert cells[0, 0].tolist() == cells[1, 2].tolist()
    assert len(np.unique(cells.reshape(-1, 4), axis=0)) == 5
    assert cells[1, 1, 3] == 0  # not asked: nothing is drawn
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["arrived", "another stood in", "lost on the way up", "refused"]


def test_arrivals_of_many_rounds_are_shares():
    status = np.full((2, 1201), ARRIVED, dtype=np.uint8)
    status[0, 1:] = LOST_UP
    status[1, :600] = NOT_ASKED
    axes = drawn(figures.arrivals(status, np.zeros_like(status, dtype=bool))).axes[0]
    image = axes.images[0]
    share = image.get_array()
    # 241 blocks of 5 rounds, the last of one.
    assert share.shape == (2, 241)
    assert share[0, :2].tolist() == [20.0, 0.0]
    assert bool(share.mask[1, 0])
    assert share[1, 120] == 100.0
    assert image.get_extent()[:2] == [0.5, 1205.5]
    assert axes.get_xlim() == (0.5, 1201.5)


@pytest.mark.parametrize("shape", [(1, 1), (10, 20), (200, 150)])
def test_arrivals_of_all_sizes(shape):
    drawn(figures.arrivals(np.full(shape, ARRIVED, dtype=np.uint8), np.zeros(shape, dtype=bool)))


def test_similarity_leaves_out_the_diagonal_and_marks_the_unknown():
    matrix = np.array([[0.0, -1.0, UNKNOWN], [-1.0, 0.0, -3.0], [UNKNOWN, -3.0, 0.0]])
    figure = drawn(figures.similarity(matrix))
    values = figure.axes[0].images[0].get_array()
    assert values.mask.tolist() == [[True, False, True], [False, True, False], [True, False, True]]
    assert (values.min(), values.max()) == (-3.0, -1.0)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["never arrived together"]
    assert matrix[0, 0] == 0.0  # what was given is not changed


def test_similarity_with_everything_known_has_no_legend():
    assert not drawn(figures.similarity(-np.ones((3, 3)))).legends


def test_similarity_with_nothing_known_has_no_scale():
    assert len(drawn(figures.similarity(np.full((3, 3), UNKNOWN))).axes) == 1


def test_label_counts_in_numbers_when_they_fit():
    counts = np.array([[5, 0], [1, 7], [2, 2]])
    axes = drawn(figures.label_counts(counts)).axes[0]
    assert axes.images[0].get_array().tolist() == [[5, 1, 2], [0, 7, 2]]
    assert {(text.get_position(), text.get_text()) for text in axes.texts} == {
        ((0, 0), "5"), ((1, 0), "1"), ((1, 1), "7"), ((2, 0), "2"), ((2, 1), "2"),
    }  # fmt: skip
    assert drawn(figures.label_counts(np.ones((200, 10), dtype=int))).axes[0].texts[:] == []


def test_masks_let_the_first_round_out_of_the_picture():
    flat = [line("a", [0.2, 0.2, 0.2])]
    figure = drawn(figures.masks(flat, flat, [line("a", [0.8, 0.01, 0.0])]))
    assert [data(axes.lines[0])[1] for axes in figure.axes] == [[20, 20, 20], [20, 20, 20], [80, 1, 0]]
    assert texts(figure.axes[2]) == ["round 1: 80 %"]
    assert figure.axes[2].get_ylim()[1] == pytest.approx(1.3)
    assert texts(figure.axes[1]) == []


def test_traffic_beside_dense():
    up, down = [line("a", [1e6, 2e6])], [line("a", [1e3, 2e3])]
    figure = drawn(figures.traffic(up, down, [4e6]))
    left, right = figure.axes
    assert [data(artist)[1] for artist in left.lines] == [[4, 4], [1, 2]]
    assert texts(left) == ["a", "dense"]
    assert left.get_ylabel() == "MB a message"
    assert [data(artist)[1] for artist in right.lines] == [[4, 4], [0.001, 0.002]]
    assert right.get_ylabel() == "MB a message"


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_same_data_give_the_same_bytes(kind):
    rng = np.random.default_rng(3)
    values = rng.random((3, 50))
    first, second = (render(figures.curves([line("a", values)], "loss"), kind) for _ in range(2))
    assert first == second
    assert b"Date" not in first
    assert b"<dc:date>" not in first


def test_the_users_own_settings_neither_matter_nor_change():
    with matplotlib.rc_context({"lines.linewidth": 9.0, "font.size": 30.0, "svg.hashsalt": "mine"}):
        before = dict(matplotlib.rcParams)
        loud = render(figures.curves([line("a", [1.0, 2.0])], "loss"), "svg")
        assert dict(matplotlib.rcParams) == before
    assert loud == render(figures.curves([line("a", [1.0, 2.0])], "loss"), "svg")


def test_no_global_plotting_state():
    code = (
        "import sys, numpy as np\n"
        "import safari.report as r\n"
        "assert 'matplotlib' not in sys.modules, 'imported too early'\n"
        "from safari.report import figures, style\n"
        "style.render(figures.similarity(np.zeros((3, 3))), 'png')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"figures need matplotlib: pip install 'safari-fl\[plots\]'"):
        figures.similarity(np.zeros((3, 3)))


@patient
@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0.01, 0.12))
def test_names_never_touch(wanted, gap):
    places = spread_out(wanted, gap, 0.0, 1.0)
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    for one, following in pairwise(order):
        assert places[following] - places[one] >= gap - 1e-6
    assert all(-1e-6 <= place <= 1 + 1e-6 for place in places)


@patient
@given(st.lists(st.floats(0, 1), max_size=8, unique_by=lambda x: round(x / 0.1)), st.just(0.0001))
def test_names_with_room_stay_where_they_are(wanted, gap):
    np.testing.assert_allclose(spread_out(wanted, gap, 0.0, 1.0), wanted, atol=1e-3)


@patient
@given(st.integers(1, 5000), st.integers(2, 400))
def test_thinning_keeps_the_ends(count, most):
    kept = thin(count, most)
    assert (kept[0], kept[-1]) == (0, count - 1)
    assert len(kept) <= max(most, 1)
    assert (np.diff(kept) > 0).all()


def layer_data(density, churn, names=None):
    density, churn = np.array(density, dtype=float), np.array(churn, dtype=float)
    names = names or tuple(f"{k}.weight" for k in range(density.shape[1]))
    return LayerData(names, np.arange(1.0, len(density) + 1), density, churn)


def test_a_dead_layer_is_not_an_unknown_one():
    density = [[0.5, 0.2, np.nan]] * 2 + [[0.5, 0.0, np.nan]] * 2
    data = layer_data(density, [[0.5, 0.8, np.nan], [0.0] * 3, [0.0, 0.2, np.nan], [0.0] * 3])
    assert data.dead == ("1.weight",)
    figure = drawn(figures.layers(data))
    kept, dead = figure.axes[0].images
    assert kept.get_array().mask.tolist() == [[False] * 4, [False, False, True, True], [True] * 4]
    # Painted where the layer is dead alone: not where nothing is known of one.
    assert (dead.get_array()[..., 3] > 0).tolist() == [[False] * 4, [False, False, True, True], [False] * 4]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "dead: nothing of the layer is left"
    ]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == [
        "0.weight",
        "1.weight",
        "2.weight",
    ]


def test_names_of_layers_that_no_font_or_formula_has():
    names = ("\ud800", "a$^$b", "0.weight", "x" * 5_000)
    figure = drawn(figures.layers(layer_data([[0.5] * 4] * 2, [[0.0] * 4] * 2, names)))
    shown = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert shown == ["\\ud800", "a$^$b", "0.weight", f"{'x' * 57}..."]


def test_how_long_weights_live():
    # Half of the layer is kept; a tenth of the layer is cut and regrown every round: five rounds on average.
    regrown = layer_data([[0.5, 0.5, 0.9, np.nan]] * 9, [[0.5] * 4] + [[0.2, 0.0, 0.0, np.nan]] * 8)
    assert regrown.life.tolist()[:3] == [5.0, np.inf, np.inf]
    assert np.isnan(regrown.life[3])
    # Cut without regrowth: 0.4 + 0.3 + 0.2 were kept before 0.1 was cut three times.
    assert layer_data([[0.4], [0.3], [0.2], [0.1]], [[0.6], [0.1], [0.1], [0.1]]).life == pytest.approx([3.0])
    assert np.isnan(layer_data([[0.4]], [[0.6]]).life).all()
    drawn(figures.layers(regrown))


@pytest.mark.parametrize(("rounds", "count"), [(2, 1), (700, 60)])
def test_layers_of_all_sizes(rounds, count):
    figure = drawn(figures.layers(layer_data(np.full((rounds, count), 0.5), np.zeros((rounds, count)))))
    assert len(figure.axes[0].get_yticklabels()) <= 24
    assert texts(figure.axes[2]) == ["longer than\nthe run"]


def test_bytes_are_points():
    figure = drawn(figures.traffic([line("a", [10.0, 20.0])], [line("a", [5.0, 5.0])], [40.0]))
    (points,) = [found for found in figure.axes[0].lines if found.get_marker() == "o"]
    assert (points.get_linestyle(), points.get_ydata().tolist()) == ("None", [10.0, 20.0])
