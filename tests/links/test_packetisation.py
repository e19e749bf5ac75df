"""Packets of models that were not encoded: near those of models that were."""

from __future__ import annotations

import numpy as np
import pytest

from safari.errors import SafariError
from safari.links.packetisation import Packetisation, coverage
from safari.wire import Lossy, Shared, WireLayout, covered, packets

LAYOUT = WireLayout(["a", "a.bias", "b", "bn", "fc"], [30_000, 64, 40_000, 900, 5_000], [1, 0, 1, 0, 1])
PRUNABLE = np.repeat(np.array(LAYOUT.prunable), LAYOUT.sizes)


def upload(seed: int, density: tuple[float, ...] = (0.1, 1, 0.3, 1, 0.6)):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=LAYOUT.d).astype(np.float32)
    mask = (rng.random(LAYOUT.d) < np.repeat(density, LAYOUT.sizes)) | ~PRUNABLE
    vector = np.where(mask, x + 0.01 * rng.normal(size=LAYOUT.d).astype(np.float32), 0).astype(np.float32)
    return x, vector, mask


@pytest.mark.parametrize("knows_mask", [True, False])
@pytest.mark.parametrize("values", ["absolute", "auto", "step", "bf16"])
def test_packets_that_were_only_worked_out_are_near_the_real_ones(values, knows_mask):
    lossy = lambda: Lossy(8, 1.0, np.random.default_rng(0), 0.0)
    shared = {}
    for seed in (0, 1):
        x, _, mask = upload(seed)
        shared[seed] = Shared(LAYOUT, x, mask if knows_mask else None)
    _, vector, mask = upload(0)
    found = Packetisation.measure(vector, mask, shared[0], limit=1155, values=values, lossy=lossy())
    # Another client: other numbers, another mask.
    _, vector, mask = upload(1)
    real = packets(vector, mask, shared[1], limit=1155, values=values, lossy=lossy())
    edges = found.edges(mask)
    assert edges[0] == 0
    assert edges[-1] == LAYOUT.d
    assert abs(len(edges) - 1 - len(real)) <= max(2, 0.06 * len(real))
    assert 0.8 * 1155 < found.packet <= 1155
    # Losing the same share of packets loses the same coordinates, up to the edges.
    starts = np.array(
        [np.flatnonzero(LAYOUT.to_wire(np.isin(np.arange(LAYOUT.d), covered(p, LAYOUT))))[0] for p in real]
    )
    guess = np.interp(np.linspace(0, 1, 50), np.linspace(0, 1, len(edges) - 1), edges[:-1])
    true = np.interp(np.linspace(0, 1, 50), np.linspace(0, 1, len(starts)), starts)
    assert np.abs(guess - true).max() < 0.08 * LAYOUT.d


def test_coverage_is_what_the_packets_say():
    x, vector, mask = upload(0)
    shared = Shared(LAYOUT, x, mask)
    real = packets(vector, mask, shared, limit=1155)
    starts = [0]
    for data in real:
        starts.append(starts[-1] + len(covered(data, LAYOUT)))
    delivered = np.random.default_rng(1).random(len(real)) < 0.6
    expected = np.zeros(LAYOUT.d, bool)
    for data, came in zip(real, delivered, strict=True):
        expected[covered(data, LAYOUT)] = came
    assert (coverage(LAYOUT, np.array(starts), delivered) == expected).all()


def test_a_model_of_one_packet():
    layout = WireLayout(["w"], [20], [True])
    x = np.ones(20, np.float32)
    found = Packetisation.measure(2 * x, x > 0, Shared(layout, x, x > 0), limit=1155)
    assert found.edges(x > 0).tolist() == [0, 20]
    assert coverage(layout, found.edges(x > 0), [False]).sum() == 0


def test_what_does_not_fit_is_refused():
    with pytest.raises(SafariError, match="delivered must say it of the 2 packets, got 1"):
        coverage(LAYOUT, np.array([0, 5, LAYOUT.d]), [True])
    _, vector, mask = upload(0)
    found = Packetisation.measure(vector, mask, Shared(LAYOUT), limit=1155)
    with pytest.raises(SafariError, match=r"mask must be bool\[75964\], got bool\[3\]"):
        found.edges(np.ones(3, bool))
