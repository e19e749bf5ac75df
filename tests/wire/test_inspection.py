from __future__ import annotations

import numpy as np
import pytest

from safari.errors import WireError
from safari.wire import Shared, SharedKnowledgeError, encode, inspect, packets
from wire.samples import LOSSY_MODES, layout_of, lossy, small_layout, small_model


@pytest.mark.parametrize("values", ["absolute", "difference", *LOSSY_MODES])
@pytest.mark.parametrize("mask_mode", ["known", "flips", "coded"])
def test_parts_add_up_and_densities_are_those_of_the_mask(values, mask_mode):
    layout = small_layout()
    vector, mask, reference, predicted = small_model(layout)
    shared = Shared(layout, reference, mask if mask_mode == "known" else predicted)
    frame = encode(vector, mask, shared, values=values, mask_mode=mask_mode, lossy=lossy())
    seen = inspect(frame, shared)
    assert (seen.kind, seen.size, seen.modes.values, seen.modes.mask) == (
        "frame",
        len(frame),
        values,
        mask_mode,
    )
    assert sum(seen.parts.values()) == len(frame)
    assert seen.kept == mask.sum()
    starts = np.concatenate([[0], np.cumsum(layout.sizes)])
    expected = {
        name: int(mask[a:b].sum())
        for name, a, b in zip(layout.names, starts, starts[1:], strict=False)
        if b > a
    }
    assert {entry.name: entry.kept for entry in seen.density} == expected
    assert all(entry.density == entry.kept / entry.size for entry in seen.density)
    assert seen.over_bound is not None
    assert seen.over_bound > 1
    assert seen.dense_ratio == 4 * layout.d / len(frame)


def test_bound_by_hand():
    # Half of 64 bits kept: 8 bytes of entropy. Two exponents, equally often, in 32 numbers: 4 bytes.
    layout = layout_of([64], [True])
    mask = np.arange(64) % 2 == 0
    vector = np.where(mask, np.where(np.arange(64) % 4 == 0, 1.5, -3.0), 0).astype(np.float32)
    bound = inspect(encode(vector, mask, layout), layout).bound
    assert bound == {"mask": pytest.approx(8), "scales": 0, "symbols": pytest.approx(4), "raw": 96}


def test_a_large_frame_is_near_its_bound():
    layout = layout_of([36864] * 3 + [64], [True] * 3 + [False])
    vector, mask, reference, _ = small_model(layout)
    assert inspect(encode(vector, mask, layout), layout).over_bound < 1.02
    shared = Shared(layout, reference, mask)
    assert inspect(encode(vector, mask, shared), shared).over_bound < 1.02


def test_a_frame_without_what_it_needs_shows_its_head():
    layout = small_layout()
    vector, mask, reference, predicted = small_model(layout)
    shared = Shared(layout, reference, predicted)
    frame = encode(vector, mask, shared, values="difference", mask_mode="flips")
    seen = inspect(frame)
    assert seen.parts == {"head": 34, "body": len(frame) - 34}
    assert seen.info.reference_digest == shared.reference_digest
    assert seen.bound is None
    assert seen.over_bound is None
    assert (seen.span, seen.kept, seen.density, seen.dense_ratio) == (None, None, None, None)
    assert inspect(frame, layout, predicted_mask=predicted).kept == mask.sum()
    with pytest.raises(SharedKnowledgeError, match=r"^layout must be"):
        inspect(frame, layout_of([3], [True]))


def test_packets_are_explained_too():
    layout = small_layout()
    vector, mask, *_ = small_model(layout)
    datagrams = packets(vector, mask, layout, limit=150)
    seen = [inspect(data, layout) for data in datagrams]
    assert [s.size for s in seen] == [len(data) for data in datagrams]
    assert all(sum(s.parts.values()) == s.size for s in seen)
    assert sum(s.kept for s in seen) == mask.sum()
    assert sum(s.span for s in seen) == layout.d
    assert {s.kind for s in seen} == {"packet"}
    with pytest.raises(WireError, match=r"^a packet cannot be read without the layout \(at byte 0\)$"):
        inspect(datagrams[0])


@pytest.mark.parametrize(
    ("data", "begins"),
    [
        (b'title = "Mine"', "begins with b'title = '"),
        (b"Sparse", "begins with b'Sparse'"),
        (b"\x00", r"begins with b'\x00'"),
        (b"", "is empty"),
    ],
)
def test_the_error_about_foreign_bytes_shows_how_they_begin(data, begins):
    with pytest.raises(WireError) as error:
        inspect(data)
    assert str(error.value) == (
        f"this is no frame and no packet: it {begins}; a frame begins with b'SAF\\x02', "
        "a packet with a byte from 0xb0 to 0xbf (at byte 0)"
    )


def test_a_frame_of_another_version_or_cut_short_is_still_one():
    with pytest.raises(WireError, match=r"^magic must be 53414602, got 53414601 \(at byte 0\)$"):
        inspect(b"SAF\x01abc")
    for data in (b"S", b"SAF"):
        with pytest.raises(WireError, match=r"^magic"):
            inspect(data)
