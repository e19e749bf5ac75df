from __future__ import annotations

from math import lgamma, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safari.errors import SafariError, WireError
from safari.wire import (
    Identity,
    IdentityError,
    Shared,
    SharedKnowledgeError,
    decode,
    decode_mask,
    decode_packet,
    encode,
    encode_mask,
    inspect,
    merge,
    packets,
)
from wire.samples import MASK_MODES, layout_of, models, same_bits, small_layout, small_model

# The prunable entries of a ResNet-20, and densities that differ as an Erdős–Rényi kernel's do.
SIZES = [432] + [2304] * 6 + [4608] + [9216] * 5 + [512, 18432] + [36864] * 5 + [2048, 640]
DENSITIES = [1.0] + [0.6] * 6 + [0.45] + [0.3] * 5 + [1.0, 0.22] + [0.15] * 5 + [0.6, 1.0]


def choices_bits(n, k):
    """The bits to choose k of n: log2 of the binomial coefficient."""
    return (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)) / log(2)


def exchanged(share, seed=0):
    """(layout, held mask, new mask, entropy in bytes): in each layer a share of the kept weights swapped."""
    rng = np.random.default_rng(seed)
    layout = layout_of([*SIZES, 900], [True] * len(SIZES) + [False])
    held, bits, start = np.ones(layout.d, bool), 0.0, 0
    new = held.copy()
    for size, density in zip(SIZES, DENSITIES, strict=True):
        here = rng.permutation(size) < round(size * density)
        kept, cut = np.flatnonzero(here), np.flatnonzero(~here)
        count = min(round(share * kept.size), cut.size)
        after = here.copy()
        after[rng.choice(kept, count, replace=False)] = False
        after[rng.choice(cut, count, replace=False)] = True
        held[start : start + size], new[start : start + size] = here, after
        bits += choices_bits(kept.size, count) + choices_bits(cut.size, count)
        start += size
    return layout, held, new, bits / 8


@given(models(), st.sampled_from(["auto", "best", *MASK_MODES]))
def test_a_mask_alone_comes_back(model, mask_mode):
    layout, _, mask, _, predicted = model
    held = mask if mask_mode == "known" else predicted
    data = encode_mask(mask, layout, held, mask_mode=mask_mode)
    assert decode_mask(data, Shared(layout, None, held)).tolist() == mask.tolist()
    # Relying on the held mask costs its digest.
    assert len(encode_mask(mask, layout, held)) <= len(data) + 8


@given(models(), st.sampled_from(["absolute", "difference", "bf16"]), st.integers(0, 2**32 - 1))
def test_kept_numbers_that_are_zero_stay_kept(model, values, seed):
    layout, vector, mask, reference, predicted = model
    zeroed = np.where(np.random.default_rng(seed).random(layout.d) < 0.5, np.float32(0), vector)
    shared = Shared(layout, reference, predicted)
    found = decode(encode(zeroed, mask, shared, values="absolute", mask_mode="best"), shared)
    assert same_bits(found.vector, zeroed)
    assert found.mask.tolist() == mask.tolist()
    nothing = np.zeros(layout.d, np.float32)
    frame = encode(nothing, mask, Shared(layout, nothing, predicted), values=values, mask_mode="swaps")
    assert decode(frame, Shared(layout, nothing, predicted)).mask.tolist() == mask.tolist()


@given(models(), st.integers(0, 2**32 - 1))
def test_swaps_travel_in_packets_too(model, seed):
    layout, vector, mask, reference, predicted = model
    shared = Shared(layout, reference, predicted)
    datagrams = packets(vector, mask, shared, limit=100, mask_mode="swaps")
    merged = merge((decode_packet(data, shared) for data in datagrams), layout)
    assert same_bits(merged.vector, vector)
    assert merged.mask.tolist() == mask.tolist()


@pytest.mark.parametrize(("share", "most"), [(0.01, 1.09), (0.03, 1.06), (0.06, 1.06)])
def test_an_exchange_is_near_its_entropy(share, most):
    layout, held, new, entropy = exchanged(share)
    size = len(encode_mask(new, layout, held)) - 26
    assert entropy < size < most * entropy
    assert size < len(encode_mask(new, layout, held, mask_mode="flips")) - 26
    assert size < 0.25 * len(encode_mask(new, layout))


def test_a_mask_that_both_ends_can_work_out_costs_its_head():
    layout, held, *_ = exchanged(0.01)
    assert len(encode_mask(held, layout, held)) == 26


def test_the_old_choice_does_not_change():
    """Sizes in records are those of "auto"."""
    layout, held, new, _ = exchanged(0.06)
    shared = Shared(layout, None, held)
    frame = encode(new.astype(np.float32), new, shared)
    assert inspect(frame).modes.mask == "flips"
    best = encode(new.astype(np.float32), new, shared, mask_mode="best")
    assert inspect(best).modes.mask == "swaps"
    assert len(best) < len(frame)
    seen = inspect(best, shared)
    assert 1 < seen.parts["mask"] / seen.bound["mask"] < 1.06


def test_what_a_mask_relies_on_is_checked():
    layout = small_layout()
    vector, mask, _, predicted = small_model(layout)
    data = encode_mask(mask, layout, predicted, identity=Identity("a", 1, bytes(8)))
    with pytest.raises(SharedKnowledgeError, match=r"^predicted mask must be \w{16}, ours is none"):
        decode_mask(data, layout)
    with pytest.raises(IdentityError, match=r"^round must be 2, got 1"):
        decode_mask(data, layout, predicted, expect=Identity("a", 2, bytes(8)))
    with pytest.raises(WireError, match=r"^the frame must hold numbers, this one holds a mask alone"):
        decode(data, layout, predicted_mask=predicted)
    with pytest.raises(
        WireError, match=r"^the frame must hold a mask alone, this one has numbers \(absolute\)"
    ):
        decode_mask(encode(vector, mask, layout), layout)
    with pytest.raises(
        SafariError, match=r"^mask must keep every number of the entries that are not prunable$"
    ):
        encode_mask(np.zeros(layout.d, bool), layout)
