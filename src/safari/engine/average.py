"""The running average of the global models in a run: begun, moved on, and found again in a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from safari.aggregation import running_average
from safari.config import Config
from safari.errors import RunError
from safari.runs import Saved, Trial

# The name of its tensor in a checkpoint, beside "model".
AVERAGE = "average"


def begin_average(model: Tensor, config: Config) -> Tensor | None:
    """The average before the first round; None where the config asks for none."""
    return model if config.aggregation.average else None


def next_average(past: Tensor | None, model: Tensor, t: int, config: Config) -> Tensor | None:
    """The average after round t (counted from 0), which ended with this model; None where there is none."""
    return None if past is None else running_average(past, model, t, config.aggregation.average)


def saved_average(saved: Saved, config: Config, trial: Trial, device: torch.device) -> Tensor | None:
    """The average that a checkpoint holds; RunError where the config asks for one and it has none."""
    if not config.aggregation.average:
        return None
    found = saved.tensors.get(AVERAGE)
    if found is None or found.shape != saved.tensors["model"].shape:
        raise RunError(
            f"{trial.checkpoint} holds no average of the models, and aggregation.average is "
            f"{config.aggregation.average}. Put 0 there, or begin a new run"
        )
    return found.to(device)
