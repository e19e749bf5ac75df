from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given

from safari.errors import SafariError
from safari.wire import Shared, WireLayout, reference_digest
from wire.samples import layout_of, models, small_layout


@given(models())
def test_wire_order_is_a_permutation_with_the_prunable_first(model):
    layout, *_ = model
    places = np.arange(layout.d)
    wire = layout.to_wire(places)
    assert sorted(wire.tolist()) == places.tolist()
    assert layout.from_wire(wire).tolist() == places.tolist()
    prunable = np.repeat(np.array(layout.prunable, bool), layout.sizes)
    assert prunable[wire[: layout.prunable_total]].all()
    assert not prunable[wire[layout.prunable_total :]].any()
    assert layout.places(places[::3]).tolist() == wire[::3].tolist()
    for first in range(0, layout.d, 7):
        span = min(20, layout.d - first)
        assert layout.positions(first, span).tolist() == wire[first : first + span].tolist()


def test_digest_depends_on_names_sizes_and_flags_alone():
    layout = WireLayout(["a", "b"], [2, 3], [True, False])
    assert layout.digest == hashlib.sha256(b"1:a,2,1;1:b,3,0;").digest()[:8]
    assert layout.digest == WireLayout(("a", "b"), np.array([2, 3]), np.array([1, 0], bool)).digest
    others = [
        WireLayout(["a", "c"], [2, 3], [True, False]),
        WireLayout(["a", "b"], [3, 2], [True, False]),
        WireLayout(["a", "b"], [2, 3], [True, True]),
        WireLayout(["a,2,1;1:b"], [3], [False]),
    ]
    assert len({layout.digest, *(other.digest for other in others)}) == 5


def test_layouts_that_cannot_be():
    with pytest.raises(
        SafariError, match=r"^names, sizes and prunable must be equally long, got 1, 2 and 1$"
    ):
        WireLayout(["a"], [1, 2], [True])
    with pytest.raises(SafariError, match=r"^sizes must be at least 0, got -1$"):
        WireLayout(["a"], [-1], [True])
    with pytest.raises(
        SafariError, match=r"^a layout must hold fewer than 2147483648 numbers, got 2147483648$"
    ):
        WireLayout(["a"], [2**31], [True])


def test_shared_arrays_are_checked():
    layout = layout_of([2, 1], [True, False])
    with pytest.raises(SafariError, match=r"^reference must be float32\[3\], got float64\[3\]$"):
        Shared(layout, np.zeros(3))
    with pytest.raises(SafariError, match=r"^predicted_mask must be bool\[3\], got bool\[2\]$"):
        Shared(layout, None, np.ones(2, bool))
    with pytest.raises(
        SafariError, match=r"^predicted_mask must keep every number of the entries that are not"
    ):
        Shared(layout, None, np.array([True, True, False]))


def test_reference_digest_sees_every_bit():
    vector = np.zeros(small_layout().d, np.float32)
    before = reference_digest(vector)
    vector[3] = -0.0
    assert reference_digest(vector) != before


def test_wire_never_imports_torch():
    code = "import sys, safari.wire; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
