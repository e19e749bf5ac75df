"""The learning rate of a round, as a config has it."""

from __future__ import annotations

from safari.config import Config
from safari.training import lr_at


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
