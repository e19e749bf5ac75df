"""Checks of what models need of their inputs, with errors in plain words."""

from __future__ import annotations

from safari.bounds import at_least, at_most
from safari.errors import ConfigError

# Channels or neurons of a layer, and layers. No machine that this runs on holds more, and the attempt takes long.
MOST_WIDE, MOST_LAYERS = 1_000_000, 1000


def need_images(name: str, shape: tuple[int, ...], smallest: int) -> None:
    """ConfigError unless a sample is a picture with at least `smallest` pixels on each side."""
    if len(shape) != 3 or min(shape[1:]) < smallest:
        size = f"{smallest}x{smallest}"
        hint = "; text is for gru, lstm and transformer, features for mlp" if len(shape) == 1 else ""
        raise ConfigError(
            f"{name} needs pictures (channels, height, width) of at least {size}; got {shape}{hint}"
        )


def need_tokens(name: str, shape: tuple[int, ...], tokens: int) -> None:
    """ConfigError unless a sample is a sequence of tokens."""
    if len(shape) != 1 or tokens < 1:
        kind = f"tokens of shape {shape}" if tokens else f"numbers of shape {shape}"
        raise ConfigError(
            f"{name} reads sequences of tokens (int64 of shape [length]); these samples are {kind}"
        )


def need_positive(field: str, value: int, most: int = MOST_WIDE) -> None:
    """ConfigError unless an option is at least 1 and no larger than a model can be built with."""
    at_most(field, at_least(field, value, 1), most)
