"""What the page's scripts compute, asked in Chromium and held against plain Python."""

from __future__ import annotations

import numpy as np
import pytest

from safari.report.table import human_bytes


@pytest.fixture
def ask(browse, address):
    """Call a function of one of the page's modules."""
    page = browse(address)

    def call(module, expression, value=None):
        return page.evaluate(
            f"async (value) => {{ const m = await import('/static/{module}.js'); return {expression}; }}",
            value,
        )

    return call


def planted(rng, sizes, unknown):
    """A similarity matrix of groups in a random order, some pairs never seen; and who belongs together."""
    groups = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    matrix = np.where(groups[:, None] == groups, -1.0, -3.0) + 0.2 * rng.random((len(groups),) * 2)
    matrix = (matrix + matrix.T) / 2
    matrix[rng.random(matrix.shape) < unknown] = np.nan
    matrix = np.where(np.isnan(matrix.T), np.nan, matrix)
    np.fill_diagonal(matrix, np.nan)
    return matrix, groups


@pytest.mark.parametrize(("sizes", "unknown"), [([5, 5], 0.0), ([3, 9, 4], 0.1), ([40, 60, 50, 50], 0.3)])
def test_planted_groups_are_found_and_lie_together(ask, sizes, unknown):
    matrix, groups = planted(np.random.default_rng(0), sizes, unknown)
    values = [None if np.isnan(v) else float(v) for v in matrix.ravel()]
    found = ask(
        "cluster",
        "m.clusterBySimilarity({ clients: value.clients,"
        " matrix: Float32Array.from(value.matrix, v => v ?? NaN) })",
        {"clients": len(groups), "matrix": values},
    )
    assert sorted(found["order"]) == list(range(len(groups)))
    along = groups[found["order"]]
    assert (np.diff(along) != 0).sum() == len(sizes) - 1, "each group in one piece"
    pairs = {(int(true), mine) for true, mine in zip(groups, found["groups"], strict=True)}
    assert len(pairs) == len(sizes), "one to one"
    assert [found["groups"][client] for client in found["order"]] == sorted(found["groups"])


def test_clients_without_groups_or_knowledge_stay_in_their_order(ask):
    for matrix in ([None] * 16, [0.0] * 16):
        found = ask(
            "cluster",
            "m.clusterBySimilarity({ clients: 4, matrix: Float32Array.from(value, v => v ?? NaN) })",
            matrix,
        )
        assert sorted(found["order"]) == [0, 1, 2, 3]
        assert found["groups"] == [0, 0, 0, 0]


def test_labels_make_groups(ask):
    counts = [[9, 0, 0], [0, 5, 5], [8, 1, 0], [0, 6, 4]]
    assert ask("cluster", "m.clusterByLabels(value).groups", counts) == [0, 1, 0, 1]


def test_bytes_are_written_as_in_the_table(ask):
    counts = [0, 1, 999, 999.4, 1234, 9994, 9999, 99_940, 99_960, 123_456, 999_499, 999_999, 45.6e9]
    assert ask("numbers", "value.map(m.asBytes)", counts) == [human_bytes(count) for count in counts]


def test_ticks_are_round_and_inside(ask):
    spans = [[0, 1, 5], [0.31, 0.97, 4], [1, 150, 10], [-3, 4, 3], [0, 1e-6, 5], [1, 2, 8], [0, 153_128, 5]]
    for (low, high, wanted), found in zip(
        spans, ask("numbers", "value.map(v => m.ticks(...v))", spans), strict=True
    ):
        assert 2 <= len(found) <= 2 * wanted + 1
        assert low <= found[0] < found[-1] <= high
        steps = np.diff(found)
        assert steps == pytest.approx(steps[0])
        assert f"{steps[0]:.6e}"[0] in "125"
    assert ask("numbers", "m.ticks(1, 3, 10, true)") == [1, 2, 3]


def test_the_nearest_round_is_found(ask):
    rounds = [1, 5, 6, 20]
    wanted = [0, 1, 2.9, 3.1, 5.4, 12, 14, 99]
    expected = [int(np.argmin([abs(r - w) for r in rounds])) for w in wanted]
    assert (
        ask(
            "numbers",
            "value.wanted.map(w => m.nearest(value.rounds, w))",
            {"rounds": rounds, "wanted": wanted},
        )
        == expected
    )
    assert ask("numbers", "m.nearest([], 3)") == -1
