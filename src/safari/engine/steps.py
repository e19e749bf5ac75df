"""The step mode on the models' device: each client's numbers, quantised within its budget.

Counts are made here, for many clients at once; `safari.wire.budget` says what follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from safari.engine.signs import Signs
from safari.wire import Lossy, WireLayout
from safari.wire.budget import (
    CENTRES,
    EDGES,
    STEPS_FROM,
    at_most_bits,
    choose_rounding,
    coded_bits,
    room_bits,
    steps_bits,
)
from safari.wire.layout import Ints
from safari.wire.scales import LARGEST, MOST_STEPS, near_bf16


def stepped(
    target: Tensor, masks: Tensor, layout: WireLayout, choice: Lossy, predicted: Tensor | None, signs: Signs
) -> Tensor:
    """`target` (`float64[clients, d]`, 0 where cut) in whole steps of each client's own size.

    `predicted` is the mask that the receiver expects, `bool[1 or clients, d]`.
    """
    asked = _quanta(target, masks, layout, choice.step)
    out = signs.keep_multiples(_multiples(target, asked), asked)
    if choice.ratio and layout.prunable_total:
        prunable, others = _rows(masks, layout)
        room = _rooms(masks, predicted, layout, choice.ratio) * (len(target) // len(masks))
        some = (prunable.kept.any(dim=1, keepdim=True) & (asked > 0) & asked.isfinite())[:, 0].tolist()
        most = [[at_most_bits(own) for own in _counts(part, out)] for part in (prunable, others)]
        unsure = [i for i in range(len(target)) if some[i] and most[0][i] + most[1][i] > room[i]]
        if unsure:
            at = torch.tensor(unsure, device=target.device)
            own = masks if len(masks) == 1 else masks[at]
            units = _quanta(target[at], own, layout, 1.0)
            rows = prunable.of(at), others.of(at)
            rooms = [room[i] for i in unsure]
            coarse, scales = _within(rooms, target[at], out[at], asked[at], units, rows)
            out[at], asked[at] = signs.of(at).keep_multiples(coarse, scales), scales
    return out * asked


def _within(
    room: list[float], target: Tensor, whole: Tensor, scales: Tensor, units: Tensor, rows: tuple[Row, Row]
) -> tuple[Tensor, Tensor]:
    """Whole steps and the size of one: those given where they fit, coarser ones elsewhere."""
    prunable, others = rows
    rest = [space - bits for space, bits in zip(room, _bits(others, whole), strict=True)]
    bits = _bits(prunable, whole)
    over = [i for i in range(len(target)) if bits[i] > rest[i]]
    if over:
        at = torch.tensor(over, device=target.device)
        spaces = [rest[i] for i in over]
        whole[at], scales[at] = _coarser(spaces, target[at], units[at], prunable.of(at))
    return whole, scales


def _coarser(room: list[float], target: Tensor, units: Tensor, row: Row) -> tuple[Tensor, Tensor]:
    """Whole steps and the size of one, for clients that need a coarser rounding to fit their budgets."""
    sizes = target[:, row.columns].abs() / units
    negative = target[:, row.columns] < 0
    classes = torch.bucketize(sizes, torch.from_numpy(EDGES).to(sizes.device))
    pairs = row.tallies(classes, negative, CENTRES.size)
    chosen = [choose_rounding(own, rest) for own, rest in zip(pairs, room, strict=True)]
    near = [near_bf16(c.quantum * unit).item() for c, unit in zip(chosen, units[:, 0].tolist(), strict=True)]

    def column(numbers: list[float]) -> Tensor:
        return target.new_tensor(numbers)[:, None]

    scales = torch.maximum(column(near), _least(target))
    out = _multiples(target, scales)
    steps = out[:, row.columns].abs().clamp(min=1).minimum(column([float(c.most) for c in chosen]))
    steps = torch.where(sizes > column([c.beyond for c in chosen]), steps, 0.0)
    earlier = row.previous(sizes)
    small = torch.minimum(sizes, earlier)
    unlike = row.seconds & (row.previous(negative) != negative)
    turned = unlike & (small > 0) & (small <= column([c.yields for c in chosen]))
    # The second of a pair yields to a larger or equal first, the first to a larger second.
    first = torch.zeros_like(turned, dtype=torch.int).scatter_reduce(
        1, row.before.clamp(min=0).expand(len(sizes), -1), (turned & (earlier < sizes)).int(), "amax"
    )
    negative = negative ^ (turned & (earlier >= sizes)) ^ first.bool()
    out[:, row.columns] = torch.where(row.kept, torch.where(negative, -steps, steps), 0.0) + 0.0
    return out, scales


def _multiples(target: Tensor, scales: Tensor) -> Tensor:
    exact = torch.where(scales > 0, target / scales, 0.0)
    # Adding 0 makes a plus of the minus that rounding leaves on a zero.
    return exact.round().clamp(-MOST_STEPS, MOST_STEPS) + 0.0


def _quanta(target: Tensor, masks: Tensor, layout: WireLayout, step: float) -> Tensor:
    """`float64[clients, 1]`: size of one step."""
    flags = torch.tensor(layout.prunable, device=target.device)
    sizes = torch.tensor(layout.sizes, device=target.device)
    steering = masks & torch.repeat_interleave(flags, sizes)
    # With nothing prunable kept, everything sets the step.
    steering = torch.where(steering.any(dim=1, keepdim=True), steering, masks)
    squares = torch.where(steering, target, 0.0).square().sum(dim=1, keepdim=True)
    count = steering.sum(dim=1, keepdim=True).clamp(min=1)
    wanted = (step * (squares / count).sqrt()).clamp(max=LARGEST)
    nearest = wanted.float().bfloat16().double()
    return torch.maximum(nearest, _least(target))


def _least(target: Tensor) -> Tensor:
    return upward(target.abs().amax(dim=1, keepdim=True) / MOST_STEPS).double()


def upward(numbers: Tensor) -> Tensor:
    """The smallest bfloat16, as float32, that is at least the number; see `safari.wire.scales.upward`."""
    near = numbers.float()
    above = torch.where(near.double() < numbers, near.nextafter(near.new_tensor(float("inf"))), near)
    bits = above.view(torch.int32).long()
    return (((bits + 0xFFFF) >> 16) << 16).int().view(torch.float32)


@dataclass(frozen=True, eq=False)
class Row:
    """Some columns of the models in the order of the wire; `kept` is `bool[clients or 1, columns]`."""

    columns: Tensor
    kept: Tensor

    def of(self, clients: Tensor) -> Row:
        """Select the rows of some clients."""
        return self if len(self.kept) == 1 else Row(self.columns, self.kept[clients])

    @cached_property
    def before(self) -> Tensor:
        """For each column the last one before it that is kept, or -1."""
        places = torch.arange(self.kept.shape[1], device=self.kept.device)
        last = torch.where(self.kept, places, -1).cummax(dim=1).values
        before = last.roll(1, dims=1)
        before[:, :1] = -1
        return before

    @cached_property
    def seconds(self) -> Tensor:
        """True for kept columns that are the second of a pair, counted over the kept ones."""
        return self.kept & (self.kept.cumsum(dim=1) % 2 == 0)

    def previous(self, numbers: Tensor) -> Tensor:
        """For each column the number (a row for each client) in the last kept one before it."""
        return numbers.gather(1, self.before.clamp(min=0).expand(len(numbers), -1))

    def tallies(self, classes: Tensor, negative: Tensor, of: int) -> Ints:
        """`safari.wire.budget.tally` of each client: `int64[clients, of, 2, of]`."""
        agree = (self.previous(negative) == negative).long()
        codes = (self.previous(classes) * 2 + agree) * of + classes
        clients, size = len(codes), 2 * of * of
        codes = codes + size * torch.arange(clients, device=codes.device)[:, None]
        chosen = codes[(self.kept & (self.before >= 0)).expand(clients, -1)]
        counts = torch.bincount(chosen, minlength=clients * size)
        return _numpy(counts).reshape(clients, of, 2, of)


def _rows(masks: Tensor, layout: WireLayout) -> tuple[Row, Row]:
    """The prunable columns and the others."""
    sizes = torch.tensor(layout.sizes, device=masks.device)
    prunable = torch.repeat_interleave(torch.tensor(layout.prunable, device=masks.device), sizes)
    first, second = (flags.nonzero()[:, 0] for flags in (prunable, ~prunable))
    return Row(first, masks[:, first]), Row(second, masks[:, second])


def _rooms(masks: Tensor, predicted: Tensor | None, layout: WireLayout, ratio: float) -> list[float]:
    """Bits that the numbers of each client may take; a single entry where one mask stands for all."""
    counts = [_by_entry(masks, layout)]
    if predicted is not None:
        counts.insert(0, _by_entry(masks ^ predicted, layout))
    starts = layout.wire_starts[: 1 + sum(layout.prunable)]
    room = room_bits(layout.d, ratio)
    return [
        room if predicted is not None and not ways[0].any() else room - coded_bits(ways, starts)
        for ways in zip(*counts, strict=True)
    ]


def _bits(row: Row, whole: Tensor) -> list[float]:
    """About how many bits each client's numbers in those columns take."""
    tallies = row.tallies(_classes(row, whole), whole[:, row.columns] < 0, STEPS_FROM.size)
    return [steps_bits(pairs) for pairs in tallies]


def _counts(row: Row, whole: Tensor) -> Ints:
    """Number of values in the row's columns in each class of `STEPS_FROM`, by client."""
    of = STEPS_FROM.size
    classes = _classes(row, whole) + of * torch.arange(len(whole), device=whole.device)[:, None]
    kept = classes[row.kept.expand(len(whole), -1)]
    return _numpy(torch.bincount(kept, minlength=len(whole) * of)).reshape(-1, of)


def _classes(row: Row, whole: Tensor) -> Tensor:
    edges = torch.from_numpy(STEPS_FROM).to(whole.device)
    # Nobody will decode a model that is not finite, but it has a row here.
    return torch.bucketize(whole[:, row.columns].abs().nan_to_num().long(), edges, right=True) - 1


def _numpy(counts: Tensor) -> Ints:
    return np.asarray(counts.cpu().numpy(), np.int64)


def _by_entry(bits: Tensor, layout: WireLayout) -> Ints:
    """Number of bits set in each prunable entry: `int64[rows, entries]`."""
    parts = bits.split(list(layout.sizes), dim=1)
    chosen = [part.sum(dim=1) for part, flag in zip(parts, layout.prunable, strict=True) if flag]
    found = torch.stack(chosen, dim=1) if chosen else bits.new_zeros((len(bits), 0), dtype=torch.long)
    return _numpy(found)
