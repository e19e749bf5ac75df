"""Limits of the steps' options."""

from __future__ import annotations

import math

from safari.errors import ConfigError


def above(name: str, value: float, limit: float) -> float:
    """The value, when it is a finite number above the limit."""
    if not (math.isfinite(value) and value > limit):
        raise ConfigError(f"{name} must be a finite number above {limit}, got {value}")
    return value


def within(name: str, value: float, least: float, most: float) -> float:
    """The value, when it lies between two limits, or is one of them."""
    if not least <= value <= most:
        raise ConfigError(f"{name} must lie between {least:g} and {most:g}, got {value}")
    return value


def fraction(name: str, value: float) -> float:
    """The value, when it is at least 0 and below 1."""
    if not 0 <= value < 1:
        raise ConfigError(f"{name} must be at least 0 and below 1, got {value}")
    return value
