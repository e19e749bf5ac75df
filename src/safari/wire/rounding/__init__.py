"""Rounding of a model's numbers before they are written, by value mode: one file for each method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from safari.errors import SafariError
from safari.modes import ValueMode
from safari.wire.kept import Kept, Plan
from safari.wire.layout import Bools
from safari.wire.rounding.levels import int8, qsgd
from safari.wire.rounding.sign import sign
from safari.wire.rounding.step import step
from safari.wire.rounding.threshold import threshold
from safari.wire.rounding.top_k import top_k
from safari.wire.rounding.unbiased import unbiased

# What the numbers of a sparse message can travel as.
INNER = (
    ValueMode.AUTO,
    ValueMode.ABSOLUTE,
    ValueMode.DIFFERENCE,
    ValueMode.BF16,
    ValueMode.FP16,
    ValueMode.INT8,
    ValueMode.QSGD,
    ValueMode.SIGN,
)


class LossyOptions(Protocol):
    """Object with the options of lossy modes, such as a config's section [wire]."""

    @property
    def bits(self) -> int:
        """Size of a QSGD number; see `Lossy`."""

    @property
    def step(self) -> float:
        """Quantum of the step mode; see `Lossy`."""

    @property
    def ratio(self) -> float:
        """Limit on a frame's size in the step mode; see `Lossy`."""

    @property
    def fraction(self) -> float:
        """Share of the numbers that top-k and unbiased send; see `Lossy`."""

    @property
    def threshold(self) -> float:
        """Magnitude from which the threshold mode sends a number; see `Lossy`."""


@dataclass(frozen=True)
class Lossy:
    """Options of the modes that do not keep every bit.

    Args:
        bits: The size of a QSGD number, 2 to 8, which makes `2**(bits - 1) - 1` levels.
        step: The quantum of the step mode in units of the root mean square of what is sent.
        rng: The source of randomness of qsgd and unbiased.
        ratio: Where a frame of the step mode would be more than 1/ratio of the dense model, it is rounded
            more coarsely; 0: never.
        levels: How many levels QSGD has, in place of those that `bits` makes; see `adaquant_levels`.
        fraction: The share of the prunable kept numbers that top-k sends, and unbiased on average.
        threshold: From where on a number is sent in the threshold mode, and as what: about the largest change
            of a weight that is usual in a round.
        inner: How the numbers that top-k and unbiased send are written: "auto" (exactly, the shorter way),
            "absolute", "difference", "bf16", "fp16", "int8", "qsgd" or "sign".
    """

    bits: int = 4
    step: float = 1.0
    rng: np.random.Generator | None = None
    ratio: float = 60.0
    levels: int | None = None
    fraction: float = 0.05
    threshold: float = 0.005
    inner: str = ValueMode.AUTO

    @classmethod
    def of(cls, options: LossyOptions, rng: np.random.Generator | None) -> Lossy:
        """The options of a config's section [wire], or of anything else that has them."""
        return cls(
            bits=options.bits,
            step=options.step,
            rng=rng,
            ratio=options.ratio,
            fraction=options.fraction,
            threshold=options.threshold,
        )

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise SafariError(f"bits must be 2 to 8, got {self.bits}")
        for field in ("step", "threshold"):
            if not (getattr(self, field) > 0 and np.isfinite(getattr(self, field))):
                raise SafariError(f"{field} must be positive and finite, got {getattr(self, field)}")
        if not (self.ratio >= 0 and np.isfinite(self.ratio)):
            raise SafariError(f"ratio must be finite and at least 0, got {self.ratio}")
        if self.levels is not None and not 1 <= self.levels <= MOST_LEVELS:
            raise SafariError(f"levels must be 1 to {MOST_LEVELS}, got {self.levels}")
        if not 0 < self.fraction <= 1:
            raise SafariError(f"fraction must be above 0 and at most 1, got {self.fraction}")
        if self.inner not in INNER:
            raise SafariError(f"inner must be one of {', '.join(INNER)}; got {self.inner!r}")


MOST_LEVELS = (1 << 15) - 1


def plans(mode: str, kept: Kept, lossy: Lossy, room: float | None = None) -> list[Plan]:
    """Plans for the numbers in that mode: one, or several of which the shortest is to be taken.

    `room`: about how many bits the numbers may take in the step mode, by a coarser rounding if need be.

    >>> kept = Kept(np.array([2.54, -1.0, 3.0], np.float32), None, np.array([2, 1]), 3)
    >>> (plan,) = plans("int8", kept, Lossy())
    >>> plan.numbers.scales.tolist(), plan.numbers.whole.tolist()
    ([0.02001953125, 0.023681640625], [127, -50, 127])
    """
    if mode == ValueMode.AUTO:
        return [Plan("absolute")] + ([] if kept.base is None else [Plan("difference")])
    if mode in (ValueMode.ABSOLUTE, ValueMode.DIFFERENCE, ValueMode.BF16, ValueMode.FP16):
        return [Plan(str(mode))]
    target = kept.target
    if not np.isfinite(target).all():
        raise SafariError(f"{mode} mode needs finite values")
    if ValueMode(mode).random and lossy.rng is None:
        raise SafariError(f"{mode} mode needs rng, the generator that rounds")
    if mode == ValueMode.TOP_K:
        return _within(top_k(target, kept.steering, lossy.fraction), kept, lossy)
    if mode == ValueMode.UNBIASED:
        assert lossy.rng is not None
        sent, changed = unbiased(target, kept.steering, lossy.fraction, lossy.rng)
        values = changed if kept.base is None else kept.base.astype(np.float64) + changed
        with np.errstate(over="ignore"):
            return _within(sent, replace(kept, values=values.astype(np.float32)), lossy, True)
    if mode == ValueMode.THRESHOLD:
        numbers = threshold(target, kept.steering, lossy.threshold).signed(kept)
        sent = numbers.whole != 0
        return [Plan("step", replace(numbers, whole=numbers.whole[sent]), sent)]
    if mode == ValueMode.STEP:
        return [Plan("step", step(kept, target, lossy.step, room))]
    if mode == ValueMode.SIGN:
        return [Plan("sign", sign(kept, target))]
    numbers = int8(target, kept.counts) if mode == ValueMode.INT8 else qsgd(target, kept.counts, lossy)
    return [Plan(str(mode), numbers.signed(kept))]


def _within(sent: Bools, kept: Kept, lossy: Lossy, changed: bool = False) -> list[Plan]:
    """Plans that send some of the numbers in the inner mode; `changed`: they are not the model's own."""
    values = kept.values if changed else None
    inner = ValueMode.ABSOLUTE if kept.base is None and lossy.inner == ValueMode.DIFFERENCE else lossy.inner
    return [replace(plan, sent=sent, values=values) for plan in plans(inner, kept.select(sent), lossy)]
