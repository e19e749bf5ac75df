from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safari.errors import SafariError, WireError
from safari.wire import Shared, SharedKnowledgeError, WireLayout, decode, encode, reference_digest
from wire.samples import (
    EXACT_MODES,
    LOSSY_MODES,
    MASK_MODES,
    layout_of,
    lossy,
    models,
    same_bits,
    small_layout,
    small_model,
)


def resealed(data):
    return data[:14] + zlib.crc32(data[:14] + data[18:]).to_bytes(4, "little") + data[18:]


@given(models(), st.sampled_from(["auto", *EXACT_MODES]), st.sampled_from(["auto", *MASK_MODES]))
def test_exact_modes_restore_every_bit(model, values, mask_mode):
    layout, vector, mask, reference, predicted = model
    shared = Shared(layout, reference, mask if mask_mode == "known" else predicted)
    found = decode(encode(vector, mask, shared, values=values, mask_mode=mask_mode), shared)
    assert same_bits(found.vector, vector)
    assert found.mask.tolist() == mask.tolist()
    assert values in ("auto", found.info.modes.values)
    assert mask_mode in ("auto", found.info.modes.mask)


@given(models())
def test_absolute_needs_the_layout_alone(model):
    layout, vector, mask, *_ = model
    found = decode(encode(vector, mask, layout), layout)
    assert same_bits(found.vector, vector)
    assert found.mask.tolist() == mask.tolist()


@given(models(finite=True), st.sampled_from(LOSSY_MODES), st.booleans())
def test_lossy_modes_restore_the_mask_and_come_near(model, values, relative):
    layout, vector, mask, reference, _ = model
    shared = Shared(layout, reference if relative else None)
    found = decode(encode(vector, mask, shared, values=values, lossy=lossy()), shared)
    assert found.mask.tolist() == mask.tolist()
    assert not found.vector[~mask].any()
    if values in ("int8", "bf16"):
        target = vector - reference * relative
        largest = np.abs(target[mask]).max(initial=0) + 1e-6 * np.abs(vector).max(initial=0)
        assert np.abs(found.vector - vector).max(initial=0) <= largest / 100 + 1e-37


def test_one_weight_and_no_weight():
    cases = [
        ([], [], True),
        ([0], [True], True),
        ([1], [True], True),
        ([1], [True], False),
        ([1], [False], True),
    ]
    for sizes, prunable, kept in cases:
        layout = layout_of(sizes, prunable)
        mask = np.full(layout.d, kept)
        vector = np.where(mask, np.float32(-2.5), np.float32(0)).astype(np.float32)
        found = decode(encode(vector, mask, layout), layout)
        assert found.vector.tolist() == vector.tolist()
        assert found.mask.tolist() == mask.tolist()


def test_a_negative_zero_that_is_cut_comes_back_as_zero():
    layout = layout_of([2], [True])
    vector = np.array([-0.0, 1], np.float32)
    found = decode(encode(vector, np.array([False, True]), layout), layout)
    assert found.vector.view(np.uint32).tolist() == [0, 0x3F800000]


def test_auto_takes_the_shortest_exact_frame():
    layout = small_layout()
    vector, mask, reference, predicted = small_model(layout)
    shared = Shared(layout, reference, predicted)
    every = [
        len(encode(vector, mask, shared, values=values, mask_mode=mode))
        for values in EXACT_MODES
        for mode in ("flips", "coded")
    ]
    assert len(encode(vector, mask, shared)) == min(every)
    assert decode(encode(vector, mask, shared), shared).info.modes.values == "difference"
    unrelated = Shared(layout, np.random.default_rng(9).normal(size=layout.d).astype(np.float32))
    assert decode(encode(vector, mask, unrelated), unrelated).info.modes.values == "absolute"
    same = Shared(layout, reference, mask)
    assert decode(encode(vector, mask, same), same).info.modes.mask == "known"


def test_difference_is_about_as_small_as_its_information():
    # Changes of k units in the last place, k uniform in -8 to 7: four bits a number.
    layout = layout_of([200_000], [True])
    rng = np.random.default_rng(0)
    reference = rng.uniform(1, 2, layout.d).astype(np.float32)
    change = rng.integers(-8, 8, layout.d)
    vector = (reference.view(np.uint32) + change.astype(np.uint32)).view(np.float32)
    mask = np.ones(layout.d, bool)
    shared = Shared(layout, reference, mask)
    assert len(encode(vector, mask, shared)) < 1.02 * layout.d * 4 / 8


def test_a_difference_falls_back_where_the_receiver_holds_another_reference():
    layout = small_layout()
    vector, mask, reference, _ = small_model(layout)
    ours = Shared(layout, reference)
    held = encode(vector, mask, ours, receiver_reference=reference_digest(reference))
    assert decode(held, ours).info.modes.values == "difference"
    other = reference_digest(np.zeros(layout.d, np.float32))
    for values in ("auto", "difference"):
        frame = encode(vector, mask, ours, values=values, receiver_reference=other)
        found = decode(frame, layout)
        assert found.info.modes.values == "absolute"
        assert same_bits(found.vector, vector)
    frame = encode(vector, mask, ours, values="step", receiver_reference=other)
    assert not decode(frame, layout).info.modes.relative


def test_what_is_missing_is_said():
    layout = small_layout()
    vector, mask, reference, predicted = small_model(layout)
    frame = encode(vector, mask, layout, reference=reference, predicted_mask=predicted, mask_mode="flips")
    with pytest.raises(
        SharedKnowledgeError, match=r"^reference must be \w{16}, ours is none \(at byte 18\)$"
    ):
        decode(frame, layout, predicted_mask=predicted)
    with pytest.raises(
        SharedKnowledgeError, match=r"^predicted mask must be \w{16}, ours .* \(at byte 26\)$"
    ):
        decode(frame, layout, reference=reference, predicted_mask=mask)
    other = WireLayout(["x"], [layout.d], [True])
    with pytest.raises(SharedKnowledgeError, match=r"^layout must be .*, ours .* \(at byte 6\)$") as caught:
        decode(frame, other, reference=reference, predicted_mask=np.ones(layout.d, bool))
    assert caught.value.what == "layout"


def test_arguments_are_checked():
    layout = layout_of([3, 1], [True, False])
    vector, mask = np.array([1, 0, 0, 4], np.float32), np.array([1, 0, 0, 1], bool)
    with pytest.raises(SafariError, match=r"^vector must be 0 wherever the mask cuts$"):
        encode(np.ones(4, np.float32), mask, layout)
    with pytest.raises(SafariError, match=r"^vector must be float32\[4\], got float64\[4\]$"):
        encode(vector.astype(np.float64), mask, layout)
    with pytest.raises(SafariError, match=r"^mask must be bool\[4\], got int64\[4\]$"):
        encode(vector, mask.astype(np.int64), layout)
    with pytest.raises(SafariError, match=r"^values must be .*; got 'stepp' \(did you mean 'step'\?\)$"):
        encode(vector, mask, layout, values="stepp")
    with pytest.raises(
        SafariError, match=r"^mask_mode must be one of auto, best, coded, .*, swaps; got 'all'"
    ):
        encode(vector, mask, layout, mask_mode="all")
    with pytest.raises(SafariError, match=r"^mask_mode 'known', 'flips' or 'swaps' needs predicted"):
        encode(vector, mask, layout, mask_mode="flips")
    with pytest.raises(SafariError, match=r"^mask_mode 'known' needs mask equal to .*, 2 bits differ$"):
        encode(vector, mask, layout, mask_mode="known", predicted_mask=np.ones(4, bool))
    with pytest.raises(SafariError, match=r"^reference and predicted_mask belong into Shared"):
        encode(vector, mask, Shared(layout), reference=vector)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda f: b"SAF\x01" + f[4:], r"^magic must be 53414602, got 53414601 \(at byte 0\)$"),
        (lambda f: f[:3], r"^magic needs 4 bytes, 3 are left \(at byte 0\)$"),
        (lambda f: f[:-1], r"^checksum must be [0-9a-f]{8}, got [0-9a-f]{8} \(at byte 14\)$"),
        (lambda f: f[:4] + b"\x2f" + f[5:], r"^modes byte 0x2f is not one of version 2 \(at byte 4\)$"),
        (lambda f: f[:4] + b"\x67" + f[5:], r"^none mode must not be relative \(at byte 4\)$"),
        (lambda f: resealed(f[:4] + b"\xa0" + f[5:30]), r"^round needs 4 bytes, 4 are left|model digest"),
        (lambda f: f[:4] + b"\x21" + f[5:], r"^difference mode must be relative \(at byte 4\)$"),
        (lambda f: f[:4] + b"\x60" + f[5:], r"^absolute mode must not be relative \(at byte 4\)$"),
        (lambda f: f[:4] + b"\x20\x01" + f[6:], r"^code of absolute mode must be at most 0, got 1"),
        (lambda f: resealed(f + b"\x00"), r"^raw bits must take the last \d+ bytes, \d+ are left"),
        (lambda f: resealed(f[:40]), r" \(at byte \d+\)$"),
    ],
)
def test_damage_is_named_with_its_place(change, problem):
    layout = small_layout()
    vector, mask, *_ = small_model(layout)
    with pytest.raises(WireError, match=problem):
        decode(change(encode(vector, mask, layout)), layout)
