"""The device on which a run computes, and the placement of its data."""

from __future__ import annotations

import torch

from safari.config import Config
from safari.data import Data
from safari.errors import ConfigError


def device_of(config: Config) -> torch.device:
    """Device on which the run computes; ConfigError for CUDA where torch sees none."""
    wanted = config.engine.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device is cuda, but torch sees no CUDA device; use cpu or auto")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device(wanted)
    # With its number, as tensors have it: "cuda" alone equals no tensor's device. Asking for the number initialises
    # CUDA, which checking a config must not.
    return torch.device(wanted, torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def placed(data: Data, device: torch.device) -> Data:
    """The data on the device; on the host when they would fill more than half of what is free there."""
    if device.type != "cuda":
        return data.to(device)
    size = sum(t.nbytes for t in (data.train_x, data.train_y, data.test_x, data.test_y))
    # What torch keeps for later counts as free: it may be the data of the seed before.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + kept
    return data.to(device) if size <= free // 2 else data
