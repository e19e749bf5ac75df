"""Arguments of the wrong kind are refused with a reason, and a torch module can be encoded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import safari
from safari import Layout
from safari.errors import SafariError
from safari.wire import Shared, WireLayout, decode, encode, merge, packets

LAYOUT = WireLayout(["weight", "bias"], [3, 1], [True, False])
VECTOR, MASK = np.array([1, 0, 0, 4], np.float32), np.array([1, 0, 0, 1], bool)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            {"vector": torch.ones(4)},
            "vector must be a numpy array float32[4], got a torch tensor; pass vector.detach().cpu().numpy()",
        ),
        (
            {"vector": torch.nn.Parameter(torch.ones(4))},
            "vector must be a numpy array float32[4], got a torch tensor; pass vector.detach().cpu().numpy()",
        ),
        ({"vector": [1.0, 0, 0, 4]}, "vector must be a numpy array float32[4], got a list"),
        ({"mask": None}, "mask must be a numpy array bool[4], got None"),
        ({"mask": {"0": MASK}}, "mask must be a numpy array bool[4], got a dict"),
        (
            {"reference": torch.ones(4)},
            "reference must be a numpy array float32[4], got a torch tensor; "
            "pass reference.detach().cpu().numpy()",
        ),
        (
            {"predicted_mask": torch.ones(4).bool()},
            "predicted_mask must be a numpy array bool[4], got a torch tensor; "
            "pass predicted_mask.detach().cpu().numpy()",
        ),
        (
            {"layout": Layout.of(torch.nn.Linear(3, 1))},
            "layout must be a WireLayout or Shared, got a safari.Layout; pass safari.wire_layout(layout)",
        ),
        ({"layout": None}, "layout must be a WireLayout or Shared, got None"),
    ],
)
def test_arguments_that_are_not_arrays_or_layouts_are_refused(wrong, text):
    shared = {
        "layout": LAYOUT,
        **{name: thing for name, thing in wrong.items() if name not in ("vector", "mask")},
    }
    model = {"vector": VECTOR, "mask": MASK, **wrong, **shared}
    calls = [lambda: encode(**model), lambda: packets(**model)]
    if wrong.keys() <= shared.keys():
        calls.append(lambda: decode(b"", **shared))
    for call in calls:
        with pytest.raises(SafariError) as error:
            call()
        assert str(error.value) == text


def test_a_pruned_module_travels():
    """From a torch module to bytes and back, by public names alone."""
    module = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten())
    layout = safari.Layout.of(module)
    everything = layout.split(torch.ones(layout.size, dtype=torch.bool))
    mask = layout.join({**everything, **safari.prune(module, sparsity=0.5)})
    vector, wire = layout.read(module) * mask, safari.wire_layout(layout)
    frame = encode(vector.numpy(), mask.numpy(), wire)
    assert torch.equal(torch.from_numpy(decode(frame, wire).vector), vector)
    assert wire.d == layout.size
    assert safari.wire_layout(layout, buffers=False).d == layout.parameters


def test_a_module_is_no_layout():
    with pytest.raises(SafariError, match=r"^layout must be a safari\.Layout, such as .*, got Linear$"):
        safari.wire_layout(torch.nn.Linear(3, 1))


def test_shared_and_merge_refuse_what_is_not_a_layout():
    layout = Layout.of(torch.nn.Linear(3, 1))
    with pytest.raises(
        SafariError, match=r"^layout must be a WireLayout, got a safari\.Layout; pass safari\.wire"
    ):
        Shared(layout)
    with pytest.raises(
        SafariError, match=r"^layout must be a WireLayout or Shared, got a safari\.Layout; pass"
    ):
        merge([], layout)


def test_arguments_that_are_not_bytes_are_refused():
    for wrong in ("frame", VECTOR):
        with pytest.raises(SafariError, match=r"^data must be bytes, got (str|ndarray)$"):
            decode(wrong, LAYOUT)
