"""On what a run was made: versions and hardware."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np
import torch

from safari.version import __version__, code_version


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware, without which a measurement means little."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "safari": __version__,
        "code": code_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }
