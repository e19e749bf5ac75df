"""Small models for the tests of the wire: layouts, masks and numbers, easy or extreme."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from safari.wire import Lossy, WireLayout
from safari.wire.symbols import unchained

EXACT_MODES = ("absolute", "difference")
LOSSY_MODES = ("bf16", "fp16", "int8", "qsgd", "step")
NEW_MODES = ("sign", "top-k", "unbiased", "threshold")
MASK_MODES = ("known", "flips", "coded", "swaps")

EXTREMES = np.array(
    [
        0x00000000,
        0x80000000,
        0x3F800000,
        0xBF800000,
        0x00000001,
        0x80000001,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x7F800001,
        0xFFFFFFFF,
        0x7FFFFFFF,
    ],
    np.uint32,
)


def layout_of(sizes, prunable):
    return WireLayout([f"entry{i}" for i in range(len(sizes))], sizes, prunable)


def small_layout():
    return WireLayout(
        ["conv.weight", "fc.weight", "bn.weight", "empty", "bn.mean", "Gewichtsmaß"],
        [220, 90, 5, 0, 5, 40],
        [True, True, False, True, False, True],
    )


def wide_layout():
    return WireLayout(["wide.weight"], [1600], [True])


def wide_model(layout, stripes=False):
    """Half of its bytes blank (or all of them alike), and most numbers moved the way of the last that did."""
    rng = np.random.default_rng(1)
    mask = (rng.random(layout.d) < 0.4) & np.repeat(rng.random(layout.d // 8) < 0.5, 8)
    if stripes:
        mask = np.arange(layout.d) % 8 < 4
    reference = rng.normal(0, 0.1, layout.d).astype(np.float32)
    steps = np.zeros(layout.d, np.float32)
    steps[mask] = unchained(rng.choice([-1, 0, 1], int(mask.sum()), p=[0.1, 0.15, 0.75]).astype(np.int32))
    return np.where(mask, reference + np.float32(1e-3) * steps, np.float32(0)), mask, reference


def small_model(layout, seed=0, density=0.2):
    """A vector near its reference, a mask (every other entry half full), a predicted one a few bits away."""
    rng = np.random.default_rng(seed)
    dense = np.repeat(np.array(layout.prunable, bool) ^ True, layout.sizes)
    densities = np.repeat(np.where(np.arange(len(layout.sizes)) % 2, 0.5, density), layout.sizes)
    mask = (rng.random(layout.d) < densities) | dense
    predicted = (mask ^ (rng.random(layout.d) < 0.02)) | dense
    reference = rng.normal(0, 0.1, layout.d).astype(np.float32)
    trained = reference + rng.normal(0, 1e-3, layout.d).astype(np.float32)
    return np.where(mask, trained, np.float32(0)), mask, reference, predicted


def lossy(seed=0, **choices):
    # Where half of the small models' numbers are beyond the threshold.
    return Lossy(rng=np.random.default_rng(seed), **{"threshold": 7e-4} | choices)


def same_bits(a, b):
    return a.dtype == b.dtype == np.float32 and np.array_equal(a.view(np.uint32), b.view(np.uint32))


@st.composite
def models(draw, finite=False):
    """Any layout of up to 300 numbers, densities from 0 to 1, numbers of any bits."""
    count = draw(st.integers(0, 5))
    sizes = draw(st.lists(st.integers(0, 60), min_size=count, max_size=count))
    prunable = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    layout = layout_of(sizes, prunable)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dense = ~np.repeat(np.array(prunable, bool), sizes)
    density = draw(st.sampled_from([0.0, 0.01, 0.05, 0.2, 0.5, 0.8, 0.99, 1.0]))
    mask = (rng.random(layout.d) < density) | dense
    predicted = (mask ^ (rng.random(layout.d) < draw(st.sampled_from([0.0, 0.1, 0.6])))) | dense
    kind = draw(st.sampled_from(["normal"] if finite else ["normal", "bits", "extreme"]))
    if kind == "normal":
        scale = 10.0 ** draw(st.integers(-20, 10))
        reference = rng.normal(0, scale, layout.d).astype(np.float32)
        trained = reference + rng.normal(0, scale * 1e-2, layout.d).astype(np.float32)
    elif kind == "bits":
        reference, trained = rng.integers(0, 2**32, (2, layout.d), dtype=np.uint32).view(np.float32)
    else:
        reference, trained = rng.choice(EXTREMES, (2, layout.d)).view(np.float32)
    return layout, np.where(mask, trained, np.float32(0)), mask, reference, predicted


@st.composite
def around_zero(draw):
    """Weights that set a step, and dense numbers that lie within a few of their own changes of 0."""
    sizes = draw(st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(0, 30), st.integers(1, 20)))
    layout = layout_of(sizes, [True, False, True, False])
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dense = ~np.repeat(np.array(layout.prunable), sizes)
    # Down to where numbers of 16 bits, and then those of 32, have no leading bit.
    unit = 10.0 ** draw(st.sampled_from([-44, -38, -7, -3, 0, 3]))
    spread = np.where(dense, draw(st.sampled_from([0.1, 1.0, 1000.0])), 1.0)
    reference, trained = (
        (unit * spread * rng.choice([-1, -0.3, -0.0, 0, 0.1, 0.3, 0.7, 1, 1.003], layout.d)).astype(
            np.float32
        )
        for _ in range(2)
    )
    trained = np.where(rng.random(layout.d) < 0.3, reference * np.float32(0.999), trained)
    return layout, trained, np.ones(layout.d, bool), reference
