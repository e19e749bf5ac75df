"""A round's learning rate and levels, as a config has them."""

from __future__ import annotations

import math

from torch import Tensor

from safari.config import Config, Wire
from safari.training import lr_at
from safari.wire import adaquant_levels
from safari.wire.rounding import MOST_LEVELS
from safari.wire.rounding.levels import qsgd_levels


def learning_rate(config: Config, t: int) -> float:
    """The learning rate of round t (counted from 0).

    >>> from safari.config import parse
    >>> learning_rate(parse({"rounds": 10, "local": {"lr": 0.1, "schedule": "cosine"}}), 5)
    0.05
    """
    local = config.local
    return lr_at(
        t,
        config.rounds,
        local.lr,
        local.schedule,
        end=local.final,
        milestones=local.milestones,
        factor=local.factor,
        horizon=local.horizon,
    )


def adapted_levels(wire: Wire, losses: Tensor) -> int:
    """Number of levels that the server announces for a round (AdaQuantFL), from the losses reported so far.

    `losses`: the first and the latest mean training loss, NaN before any was reported.

    >>> import torch
    >>> wire = Wire("qsgd", bits=4, adapt="loss")
    >>> [adapted_levels(wire, torch.tensor(pair)) for pair in ([torch.nan, torch.nan], [2.0, 2.0], [2.0, 0.5])]
    [7, 7, 14]
    """
    first, latest = losses.tolist()
    levels = qsgd_levels(wire.bits)
    return levels if math.isnan(first) else adaquant_levels(first, latest, levels, MOST_LEVELS)
