"""The ways in which a model's numbers can travel, by the names that a config gives them."""

from __future__ import annotations

from enum import StrEnum


class ValueMode(StrEnum):
    """Value modes that `wire.values` may name; `safari.wire` documents and implements them.

    >>> ValueMode("step").exact, ValueMode.STEP.feeds_back, ValueMode.AUTO == "auto"
    (False, True, True)
    """

    AUTO = "auto"
    ABSOLUTE = "absolute"
    DIFFERENCE = "difference"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    QSGD = "qsgd"
    STEP = "step"
    SIGN = "sign"
    TOP_K = "top-k"
    UNBIASED = "unbiased"
    THRESHOLD = "threshold"

    @property
    def exact(self) -> bool:
        """Whether every bit comes back."""
        return self in (ValueMode.AUTO, ValueMode.ABSOLUTE, ValueMode.DIFFERENCE)

    @property
    def feeds_back(self) -> bool:
        """Whether a sender should add what was left out to its next message, unless told otherwise.

        True where the same small changes would otherwise be left out every time.
        """
        return self in (ValueMode.STEP, ValueMode.SIGN, ValueMode.TOP_K, ValueMode.THRESHOLD)

    @property
    def random(self) -> bool:
        """Whether the sender draws random numbers."""
        return self in (ValueMode.QSGD, ValueMode.UNBIASED)
