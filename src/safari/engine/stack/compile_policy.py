"""Decision to compile kernels, which takes a while and pays only in a long run."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from safari.config import Config
from safari.data.augment import crop_and_flip, padding

# A first compilation takes some seconds to a minute, and saves tens of milliseconds a round of each arm;
# afterwards Triton keeps the kernels on disk. Arms do not count: kernels round differently, and an arm's
# result must not depend on the arms that run beside it.
ROUNDS_WORTH_COMPILING = 100

FORECAST = "compiling kernels for this model; that is done once, and the first round waits for it"


def compiles(config: Config, device: str) -> bool:
    """Will this run compile kernels of its own? They exist for bfloat16 on CUDA, through Triton."""
    engine = config.engine
    if engine.compile == "never" or engine.precision != "bfloat16" or device != "cuda":
        return False
    if find_spec("triton") is None:
        return False
    return engine.compile == "always" or config.rounds >= ROUNDS_WORTH_COMPILING


def kernels_run(device: torch.device) -> bool:
    """Do kernels compile and run here? There may be no compiler, or a device that it does not know."""
    try:
        from safari.engine.stack import fused

        found, gradient = torch.ones(2, 4, device=device)
        fused.sgd_(found, gradient, gradient > 0, 0.5)
        return bool((found == 0.5).all())
    except Exception:  # whatever a compiler does
        return False


def crops_run(data: Tensor) -> bool:
    """Does the kernel for crops and flips serve these pictures, and give what torch gives?"""
    if data.ndim != 4 or not data.is_floating_point() or not data.is_contiguous():
        return False
    try:
        from safari.engine.stack import fused

        pad = padding(data.shape[1:])
        index = torch.arange(8, device=data.device) % len(data)
        shift = torch.stack([index, index.flip(0)], 1) % (2 * pad + 1)
        flip = index % 2 == 0
        expected = crop_and_flip(data[index], shift, flip, pad)
        return torch.equal(fused.crops(data, index, shift, flip, pad), expected)
    except Exception:
        return False
