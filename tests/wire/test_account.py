from __future__ import annotations

import numpy as np
import pytest

from safari.wire import Shared, bounds, costs, encode, plain_costs
from wire.samples import layout_of, lossy, small_layout, small_model


def test_costs_are_those_of_real_frames():
    layout = small_layout()
    vector, mask, reference, predicted = small_model(layout)
    shared = Shared(layout, reference, predicted)
    found = {cost.name: cost for cost in costs(vector, mask, shared, lossy=lossy(ratio=0))}
    assert list(found) == [
        "absolute, mask coded",
        "difference, mask coded",
        "absolute, mask flips",
        "difference, mask flips",
        "bf16, mask flips",
        "fp16, mask flips",
        "int8, mask flips",
        "qsgd, mask flips",
        "step, mask flips",
        "sign, mask flips",
        "top-k, mask flips",
        "unbiased, mask flips",
        "threshold, mask flips",
    ]
    assert found["difference, mask flips"].size == len(encode(vector, mask, shared, values="difference"))
    assert [cost.error == 0 for cost in found.values()] == [True] * 4 + [False] * 9
    assert found["step, mask flips"].error == pytest.approx(0.29, abs=0.03)


def test_costs_without_shared_knowledge():
    layout = small_layout()
    vector, mask, *_ = small_model(layout)
    names = [cost.name for cost in costs(vector, mask, layout)]
    # Those that draw need a generator.
    modes = ("bf16", "fp16", "int8", "step", "sign", "top-k", "threshold")
    assert names == [f"{mode}, mask coded" for mode in ("absolute", *modes)]


def test_plain_costs_and_bounds_by_hand():
    layout = layout_of([100, 4], [True, False])
    mask = np.concatenate([np.arange(100) % 2 == 0, np.ones(4, bool)])
    vector = np.where(mask, 1.5, 0).astype(np.float32)
    sizes = {cost.name: cost.size for cost in plain_costs(vector, mask, layout)}
    assert sizes["dense float32"] == 416
    assert sizes["int32 index + float32"] == 8 * 54
    assert sizes["bit mask + float32"] == 13 + 4 * 54
    found = bounds(vector, mask, layout)
    assert found.floor == pytest.approx(12.5 + 4 * 54)
    assert found.order0 == pytest.approx(12.5 + 3 * 54)
