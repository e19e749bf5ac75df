"""The kept numbers of a model, and what a sender decides to say of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from safari.wire.layout import Bools, Floats, Ints
from safari.wire.scales import Wide
from safari.wire.signs import sign_lost


@dataclass(frozen=True)
class Kept:
    """Kept numbers in wire order, what the reference holds there, and how many belong to each entry.

    `steering` is how many of them, from the first, are prunable: they set the scales that all share.
    """

    values: Floats
    base: Floats | None
    counts: Ints
    steering: int

    @property
    def target(self) -> Wide:
        """Numbers to convey: the difference to the reference, or the values themselves without one."""
        with np.errstate(invalid="ignore"):  # of a signalling NaN, too
            values = self.values.astype(np.float64)
            return values if self.base is None else values - self.base

    def select(self, sent: Bools) -> Kept:
        """Some of them."""
        before = np.concatenate([[0], np.cumsum(sent)])
        edges = np.concatenate([[0], np.cumsum(self.counts)])
        base = None if self.base is None else self.base[sent]
        return Kept(self.values[sent], base, np.diff(before[edges]), int(before[self.steering]))


@dataclass(frozen=True, eq=False)
class Quantised:
    """Numbers as whole multiples of a scale: one scale for each entry, or one for all."""

    scales: Floats
    whole: npt.NDArray[np.int32]

    def part(self, entries: slice, numbers: slice) -> Quantised:
        """Cut out the scales and numbers of some neighbouring entries."""
        return Quantised(self.scales if self.scales.size == 1 else self.scales[entries], self.whole[numbers])

    def change(self, counts: Ints) -> Wide:
        """The numbers that the multiples stand for."""
        scales = self.scales.astype(np.float64)
        return self.whole * (scales if scales.size == 1 else np.repeat(scales, counts))

    def signed(self, kept: Kept) -> Quantised:
        """One multiple more where a dense number would lose its sign.

        That is enough, for a rounding is less than one scale off, and never beyond the last level: the last
        level leads to the value or further.
        """
        if kept.base is None:
            return self
        lost = sign_lost(kept.values, kept.base, self.change(kept.counts))
        lost[: kept.steering] = False
        return replace(self, whole=self.whole + lost) if lost.any() else self


@dataclass(frozen=True, eq=False)
class Plan:
    """Plan of a sender for the kept numbers of a whole model; packets are cut from one plan.

    `coding` is how the numbers are written, `numbers` what they are in the codings of whole multiples.
    `sent`: which of the kept numbers travel at all, None: all of them. `values`: what travels in place of the
    numbers themselves, None: they do.
    """

    coding: str
    numbers: Quantised | None = None
    sent: Bools | None = None
    values: Floats | None = None

    def of(self, kept: Kept) -> Kept:
        """The numbers that are written, out of the kept ones."""
        if self.values is not None:
            kept = replace(kept, values=self.values)
        return kept if self.sent is None else kept.select(self.sent)

    def part(self, entries: slice, rows: slice) -> Plan:
        """Cut out the plan for some of the kept numbers, and the entries that they are in."""
        numbers, sent = self.numbers, self.sent
        written = rows
        if sent is not None:
            before = int(np.count_nonzero(sent[: rows.start]))
            sent = sent[rows]
            written = slice(before, before + int(np.count_nonzero(sent)))
        if numbers is not None:
            numbers = numbers.part(entries, written)
        return Plan(self.coding, numbers, sent, None if self.values is None else self.values[rows])
