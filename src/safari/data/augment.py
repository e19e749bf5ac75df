"""Augmentation in two halves: the host draws (numpy, seeded), the device applies (torch, whole batches).

Drawing apart from applying keeps a run reproducible whatever the device, and lets an engine that trains many
clients at once draw for each from its own generator, then apply to all of them in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from safari.errors import ConfigError, DataError

Draws: TypeAlias = "tuple[npt.NDArray[Any], ...]"


@dataclass(frozen=True)
class Augmentation:
    """Two functions: `draw(rng, n, input_shape)` gives arrays, `apply(x, *draws)` takes them as tensors.

    Each array has a row for each of the `n` samples.

    >>> crop_flip = AUGMENTATIONS["crop-flip"]
    >>> draws = crop_flip.draw(np.random.default_rng(0), 5, (1, 8, 8))
    >>> crop_flip.apply(torch.ones(5, 1, 8, 8), *map(torch.from_numpy, draws)).shape
    torch.Size([5, 1, 8, 8])
    """

    draw: Callable[[np.random.Generator, int, tuple[int, ...]], Draws]
    apply: Callable[..., Tensor]


def draw_crop_and_flip(
    rng: np.random.Generator, n: int, pad: int = 4
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Random crops and flips for `n` images: shifts int64[n, 2] in 0..2*pad (down, right), flips bool[n]."""
    return rng.integers(0, 2 * pad + 1, size=(n, 2)), rng.random(n) < 0.5


def crop_and_flip(x: Tensor, shift: Tensor, flip: Tensor, pad: int) -> Tensor:
    """Pads images [n, c, h, w] with `pad` zeros all around, crops each at its shift, mirrors where `flip`.

    >>> x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> crop_and_flip(x, torch.tensor([[1, 1]]), torch.tensor([True]), pad=1)[0, 0].tolist()
    [[2.0, 1.0], [4.0, 3.0]]
    >>> crop_and_flip(x, torch.tensor([[2, 1]]), torch.tensor([False]), pad=1)[0, 0].tolist()
    [[3.0, 4.0], [0.0, 0.0]]
    """
    if x.ndim != 4:
        raise DataError(f"x must be images [n, channels, height, width], got shape {[*x.shape]}")
    n, _, height, width = x.shape
    for field, value, shape in (("shift", shift, [n, 2]), ("flip", flip, [n])):
        if [*value.shape] != shape:
            raise DataError(f"{field} must have shape {shape}, got {[*value.shape]}")
    rows = shift[:, :1] + torch.arange(height, device=x.device)
    across = torch.arange(width, device=x.device)
    columns = shift[:, 1:] + torch.where(flip[:, None], across.flip(0), across)
    index = rows[:, :, None] * (width + 2 * pad) + columns[:, None, :]
    padded = F.pad(x, (pad, pad, pad, pad)).flatten(2)
    return padded.gather(2, index.flatten(1)[:, None].expand(-1, x.shape[1], -1)).reshape(x.shape)


def padding(input_shape: tuple[int, ...]) -> int:
    """Largest shift of an image by a crop: an eighth of its shorter side, so 4 for 32x32 and 1 for 8x8.

    >>> padding((3, 32, 32)), padding((1, 8, 8)), padding((1, 5, 40))
    (4, 1, 1)
    """
    return max(1, min(input_shape[-2:]) // 8)


def _draw_crop_flip(rng: np.random.Generator, n: int, input_shape: tuple[int, ...]) -> Draws:
    if len(input_shape) != 3:
        raise ConfigError(
            "augmentation 'crop-flip' needs images of shape [channels, height, width], "
            f"got samples of shape {[*input_shape]}"
        )
    return draw_crop_and_flip(rng, n, padding(input_shape))


def _apply_crop_flip(x: Tensor, shift: Tensor, flip: Tensor) -> Tensor:
    """Random crops with zero padding of an eighth of the side, and horizontal flips."""
    return crop_and_flip(x, shift, flip, padding(x.shape[1:]))


def _draw_nothing(rng: np.random.Generator, n: int, input_shape: tuple[int, ...]) -> Draws:
    return ()


def _apply_nothing(x: Tensor) -> Tensor:
    """Samples as they are."""
    return x


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": Augmentation(_draw_nothing, _apply_nothing),
    "crop-flip": Augmentation(_draw_crop_flip, _apply_crop_flip),
}
"""Augmentations by name; the first line of each `apply` says what it does."""
