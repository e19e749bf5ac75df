"""What the engine says a server decodes is what it decodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from safari.engine.lossy import encodable, seen
from safari.engine.steps import upward
from safari.wire import Lossy, Shared, decode, encode
from safari.wire.scales import upward as wire_upward
from wire.samples import (
    LOSSY_MODES,
    NEW_MODES,
    around_zero,
    layout_of,
    lossy,
    models,
    same_bits,
    small_layout,
    small_model,
)

MODES = (*LOSSY_MODES, *NEW_MODES)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def decoded(vector, mask, reference, layout, values, choices):
    shared = Shared(layout, reference)
    return decode(encode(vector, mask, shared, values=values, lossy=choices), shared).vector


@pytest.mark.parametrize("device", DEVICES)
@given(model=models(finite=True), values=st.sampled_from(MODES), seed=st.integers(0, 99))
def test_a_client_is_seen_as_its_frame_decodes(device, model, values, seed):
    layout, vector, mask, reference, _ = model
    expected = decoded(vector, mask, reference, layout, values, lossy(seed, bits=3, step=0.7))
    arrays = [torch.from_numpy(a).to(device) for a in (vector[None], mask[None], reference)]
    if not layout.d:
        return
    got = seen(*arrays, layout, values, [lossy(seed, bits=3, step=0.7)])
    assert same_bits(got[0].cpu().numpy(), expected)


@pytest.mark.parametrize("device", DEVICES)
@given(
    model=around_zero(),
    values=st.sampled_from(LOSSY_MODES),
    seed=st.integers(0, 99),
    step=st.floats(0.1, 8),
    ratio=st.sampled_from([0, 2, 5, 60]),
)
def test_signs_are_kept_as_the_encoder_keeps_them(device, model, values, seed, step, ratio):
    layout, vector, mask, reference = model
    several = np.stack([vector, reference, np.abs(vector), reference - vector])
    own = {"bits": 2 + seed % 7, "step": step, "ratio": ratio}
    arrays = [torch.from_numpy(a).to(device) for a in (several, mask[None], reference)]
    got = seen(*arrays, layout, values, [lossy(seed + row, **own) for row in range(4)]).cpu().numpy()
    dense = ~np.repeat(np.array(layout.prunable), layout.sizes)
    assert not (dense & (several >= 0) & (got < 0)).any()
    for row in range(4):
        expected = decoded(several[row], mask, reference, layout, values, lossy(seed + row, **own))
        assert same_bits(got[row], expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("own", [False, True])
@given(
    seed=st.integers(0, 2**32 - 1),
    density=st.sampled_from([0.3, 0.5, 1.0]),
    shape=st.sampled_from(["normal", "laplace", "uniform", "smooth", "few"]),
    ratio=st.floats(5, 200),
)
def test_a_client_is_seen_within_its_budget(device, own, seed, density, shape, ratio):
    layout = layout_of([700, 30, 0, 1400, 11], [True, False, True, True, False])
    rng = np.random.default_rng(seed)
    dense = ~np.repeat(np.array(layout.prunable), layout.sizes)
    masks = (rng.random((3 if own else 1, layout.d)) < density) | dense
    predicted = (masks[0] ^ (rng.random(layout.d) < 0.03 * own)) | dense
    reference = rng.normal(0, 0.1, layout.d).astype(np.float32)
    changes = np.stack([update(rng, shape, layout.d) for _ in range(3)])
    # Some do not move at all.
    changes[:, 100:140] = 0
    vectors = np.where(masks, reference + 1e-3 * changes, 0).astype(np.float32)
    arrays = [torch.from_numpy(a).to(device) for a in (vectors, masks, reference)]
    expects = torch.from_numpy(predicted[None]).to(device)
    got = seen(*arrays, layout, "step", [Lossy(ratio=ratio)] * 3, expects).cpu().numpy()
    shared = Shared(layout, reference, predicted)
    for row in range(3):
        mask = masks[row % len(masks)]
        frame = encode(vectors[row], mask, shared, values="step", lossy=Lossy(ratio=ratio))
        assert same_bits(got[row], decode(frame, shared).vector)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -3e38])
def test_a_model_that_cannot_be_encoded_does_not_disturb_the_others(wrong):
    layout = small_layout()
    vector, mask, reference, _ = small_model(layout)
    bad = vector.copy()
    bad[np.flatnonzero(mask)[:40]] = wrong
    arrays = [torch.from_numpy(a) for a in (np.stack([bad, vector, bad]), mask[None], reference)]
    got = seen(*arrays, layout, "step", [Lossy()] * 3, arrays[1])
    shared = Shared(layout, reference, mask)
    expected = decode(encode(vector, mask, shared, values="step"), shared).vector
    assert same_bits(got[1].numpy(), expected)


def update(rng, shape, size):
    if shape == "few":
        return rng.normal(size=size) ** 5
    if shape == "smooth":
        return np.convolve(rng.normal(size=size + 3), np.ones(4) / 2, "valid")
    return {"normal": rng.normal, "laplace": rng.laplace, "uniform": rng.uniform}[shape](
        *([-1, 1] if shape == "uniform" else []), size=size
    )


@pytest.mark.parametrize("values", LOSSY_MODES)
@pytest.mark.parametrize("own", [False, True])
def test_many_clients_are_seen_as_each_of_them_alone(values, own):
    layout = small_layout()
    several = [small_model(layout, seed) for seed in range(4)]
    reference = several[0][2]
    # Zeros of both signs, and an entry in which nothing moved.
    reference[:3] = [0.0, -0.0, -0.0]
    masks = np.stack([m[1] for m in several] if own else [several[0][1]])
    kept = np.broadcast_to(masks, (4, layout.d))
    vectors = np.where(kept, np.stack([m[0] + reference for m in several]), np.float32(0))
    vectors[1, :220] = np.where(kept[1, :220], reference[:220], 0)
    arrays = [torch.from_numpy(a) for a in (vectors, masks, reference)]
    got = seen(*arrays, layout, values, [lossy(seed) for seed in range(4)])
    for row in range(4):
        expected = decoded(vectors[row], kept[row].copy(), reference, layout, values, lossy(row))
        assert same_bits(got[row].numpy(), expected)


@given(st.lists(st.floats(0, 3e38), min_size=1, max_size=20))
def test_scales_are_those_of_the_wire(numbers):
    numbers = np.array(numbers)
    assert same_bits(upward(torch.from_numpy(numbers)).numpy(), wire_upward(numbers))


def test_what_has_no_scale_cannot_be_encoded():
    x = torch.zeros(2)
    rows = torch.tensor([[0.0, 1e37], [0.0, 2e38], [float("nan"), 0.0], [0.0, float("-inf")]])
    assert encodable(rows, x).tolist() == [True, False, False, False]
