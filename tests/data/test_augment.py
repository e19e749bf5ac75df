from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safari.data import AUGMENTATIONS, crop_and_flip, draw_crop_and_flip
from safari.errors import ConfigError, DataError


def oracle(x: np.ndarray, shift: np.ndarray, flip: np.ndarray, pad: int) -> np.ndarray:
    """One image at a time, as one would say it."""
    out = np.empty_like(x)
    for i, image in enumerate(x):
        _, height, width = image.shape
        padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)))
        down, right = shift[i]
        cropped = padded[:, down : down + height, right : right + width]
        out[i] = cropped[:, :, ::-1] if flip[i] else cropped
    return out


@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 4),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=150)
def test_crop_and_flip_is_the_slow_way_only_faster(n, channels, height, width, pad, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, channels, height, width)).astype(np.float32)
    shift, flip = draw_crop_and_flip(rng, n, pad)
    result = crop_and_flip(torch.from_numpy(x), torch.from_numpy(shift), torch.from_numpy(flip), pad)
    assert result.is_contiguous()
    np.testing.assert_array_equal(result.numpy(), oracle(x, shift, flip, pad))


def test_the_centre_without_a_flip_changes_nothing():
    x = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(crop_and_flip(x, torch.full((3, 2), 4), torch.zeros(3, dtype=torch.bool), 4), x)


def test_draws_reach_every_shift_and_nothing_else():
    shift, flip = draw_crop_and_flip(np.random.default_rng(0), 2000, pad=2)
    assert shift.dtype == np.int64
    assert shift.shape == (2000, 2)
    assert flip.dtype == np.bool_
    assert np.unique(shift[:, 0]).tolist() == np.unique(shift[:, 1]).tolist() == [0, 1, 2, 3, 4]
    # Binomial(2000, 1/2): five standard deviations are 112.
    assert abs(int(flip.sum()) - 1000) < 112
    again, _ = draw_crop_and_flip(np.random.default_rng(0), 2000, pad=2)
    assert (shift == again).all()


@pytest.mark.parametrize(
    ("shape", "pad"), [((3, 32, 32), 4), ((1, 8, 8), 1), ((1, 4, 4), 1), ((1, 16, 64), 2)]
)
def test_the_padding_follows_the_side(shape, pad):
    augmentation = AUGMENTATIONS["crop-flip"]
    draws = augmentation.draw(np.random.default_rng(0), 500, shape)
    assert draws[0].max() == 2 * pad
    x = np.random.default_rng(1).normal(size=(500, *shape)).astype(np.float32)
    result = augmentation.apply(torch.from_numpy(x), *map(torch.from_numpy, draws))
    np.testing.assert_array_equal(result.numpy(), oracle(x, *draws, pad))


def test_draws_of_clients_apply_in_one_call():
    augmentation, shape = AUGMENTATIONS["crop-flip"], (1, 8, 8)
    x = torch.randn(3, 5, *shape, generator=torch.Generator().manual_seed(0))
    draws = [augmentation.draw(np.random.default_rng(client), 5, shape) for client in range(3)]
    together = augmentation.apply(
        x.flatten(0, 1), *(torch.from_numpy(np.concatenate(column)) for column in zip(*draws, strict=True))
    )
    for client in range(3):
        alone = augmentation.apply(x[client], *map(torch.from_numpy, draws[client]))
        assert torch.equal(together.view(x.shape)[client], alone)


def test_none_draws_nothing_and_changes_nothing():
    none, rng = AUGMENTATIONS["none"], np.random.default_rng(0)
    x = torch.randn(2, 7)
    assert none.draw(rng, 2, (7,)) == ()
    assert none.apply(x) is x
    assert rng.bit_generator.state == np.random.default_rng(0).bit_generator.state


def test_what_is_no_image_is_refused():
    with pytest.raises(ConfigError) as config_error:
        AUGMENTATIONS["crop-flip"].draw(np.random.default_rng(0), 2, (64,))
    assert str(config_error.value) == (
        "augmentation 'crop-flip' needs images of shape [channels, height, width], got samples of shape [64]"
    )
    x, shift, flip = torch.zeros(2, 1, 4, 4), torch.zeros(2, 2).long(), torch.zeros(2).bool()
    with pytest.raises(DataError, match=r"^x must be images \[n, .*\], got shape \[2, 4\]$"):
        crop_and_flip(torch.zeros(2, 4), shift, flip, 1)
    with pytest.raises(DataError, match=r"^shift must have shape \[2, 2\], got \[1, 2\]$"):
        crop_and_flip(x, shift[:1], flip, 1)
    with pytest.raises(DataError, match=r"^flip must have shape \[2\], got \[1\]$"):
        crop_and_flip(x, shift, flip[:1], 1)


@pytest.mark.gpu
def test_the_device_applies_as_the_host_does():
    x = torch.randn(16, 3, 32, 32)
    draws = tuple(map(torch.from_numpy, draw_crop_and_flip(np.random.default_rng(0), 16)))
    there = crop_and_flip(x.cuda(), *(draw.cuda() for draw in draws), 4)
    assert torch.equal(there.cpu(), crop_and_flip(x, *draws, 4))
