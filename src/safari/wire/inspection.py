"""Composition of a frame or packet, and its distance from the entropy of what it says."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from safari.errors import WireError
from safari.wire.bitmap import decode_bitmap
from safari.wire.bits import CHUNK, Bytes8, Reader, binary_bits, order0_bits
from safari.wire.body import Modes, Range, decode_changes, held_bits, kept_by_entry, whole
from safari.wire.frame import BODY_AT, MAGIC, Info, check_shared, read_info
from safari.wire.identity import Identity, check_identity
from safari.wire.layout import Bools, Floats, Ints, WireLayout
from safari.wire.packet import MAGIC as PACKET_MAGIC
from safari.wire.packet import read_packet_head
from safari.wire.scales import SCALE_BYTES
from safari.wire.shared import Shared, as_shared
from safari.wire.symbols import NIBBLES, decode_symbols
from safari.wire.values import INTEGER, SCALED, WITHOUT_SYMBOLS, counts_of, read_inner

# How many bytes of what is no frame an error shows.
_SHOWN = 8


@dataclass(frozen=True)
class EntryDensity:
    """Density of a named entry (in a packet: of its coordinates there)."""

    name: str
    kept: int
    size: int

    @property
    def density(self) -> float:
        """The fraction kept."""
        return self.kept / self.size if self.size else 0.0


@dataclass(frozen=True)
class Inspection:
    """A frame (`info` is set) or a packet explained.

    `parts` are bytes: head, mask, scales, symbols, raw (and "sent", where only some of the kept numbers
    were), which add up to `size`. `bound` holds, for all but the head, the order-0 entropy of what is coded
    and the size of what is not. Without the layout, or without a predicted mask where one is needed, there is
    a head and a body, and what else is not known is None.
    """

    kind: str
    size: int
    modes: Modes
    parts: dict[str, int]
    info: Info | None = None
    first: int = 0
    span: int | None = None
    kept: int | None = None
    density: tuple[EntryDensity, ...] | None = None
    bound: dict[str, float] | None = None

    @property
    def over_bound(self) -> float | None:
        """The size as a multiple of the bound, or None where the body could not be read."""
        return None if self.bound is None else self.size / max(sum(self.bound.values()), 1.0)

    @property
    def dense_ratio(self) -> float | None:
        """Size of the same coordinates as float32, divided by this size; None if their number is unknown."""
        return None if self.span is None else 4 * self.span / self.size


def inspect(
    data: bytes,
    layout: WireLayout | Shared | None = None,
    *,
    reference: Floats | None = None,
    predicted_mask: Bools | None = None,
    expect: Identity | None = None,
) -> Inspection:
    """Explain a frame or a packet; a packet needs the layout, and a reference only to check its context.

    `expect` is the identity to check it against; a packet that states one cannot be read without.

    >>> from safari.wire.frame import encode
    >>> layout = WireLayout(["w"], [8], [True])
    >>> mask = np.arange(8) > 3
    >>> frame = encode(mask.astype(np.float32), mask, layout)
    >>> seen = inspect(frame, layout)
    >>> seen.modes.values, seen.kept, seen.parts["raw"], seen.density[0].density
    ('absolute', 4, 12, 0.5)
    """
    reader = Reader(data)
    is_frame = bool(data) and MAGIC[:-1].startswith(data[: len(MAGIC) - 1])
    if not is_frame and (not data or data[0] & 0xF0 != PACKET_MAGIC):
        begins = f"begins with {bytes(data[:_SHOWN])!r}" if data else "is empty"
        raise WireError(
            f"this is no frame and no packet: it {begins}; a frame begins with {MAGIC!r}, "
            f"a packet with a byte from {PACKET_MAGIC:#x} to {PACKET_MAGIC | 0x0F:#x}",
            0,
        )
    if is_frame:
        info = read_info(reader)
        check_identity(info.identity, expect, BODY_AT)
        head = {"head": info.body_at, "body": reader.left}
        brief = Inspection("frame", len(data), info.modes, head, info)
        if layout is None:
            return brief
        shared = as_shared(layout, reference, predicted_mask)
        # The symbols and raw bits of a difference can be weighed without the reference itself.
        check_shared(info, shared, needs_reference=False)
        if info.modes.uses_mask and shared.mask_bits is None:
            return brief
        return _weigh(brief, reader, whole(shared.layout), shared)
    if layout is None:
        raise WireError("a packet cannot be read without the layout", 0)
    shared = as_shared(layout, reference, predicted_mask)
    modes, part = read_packet_head(reader, shared, expect)
    return _weigh(Inspection("packet", len(data), modes, {"head": reader.at}), reader, part, shared)


def _weigh(brief: Inspection, reader: Reader, part: Range, shared: Shared) -> Inspection:
    parts, bound = {"head": reader.at}, {}

    def note(name: str, least: float) -> None:
        """Attribute all that was read since the last part to this one; it takes at least `least` bytes."""
        parts[name], bound[name] = reader.at - sum(parts.values()), least

    keep, least = _read_keep(reader, part, brief.modes, shared)
    note("mask", least)
    counts = kept_by_entry(keep, part)
    coding, code, written = brief.modes.values, brief.modes.code, counts
    if coding == "sparse":
        sent = decode_bitmap(reader, counts)
        coding, code = read_inner(reader, brief.modes.relative)
        note("sent", _entropy(sent, counts))
        written = counts_of(sent, counts)
    if coding in SCALED:
        reader.take(SCALE_BYTES * (1 if coding == "step" else counts.size), "scales")
    note("scales", float(reader.at - sum(parts.values())))
    n = 0 if coding in WITHOUT_SYMBOLS else int(written.sum())
    row = decode_symbols(reader, (n + 1) >> 1 if coding in INTEGER and code == NIBBLES else n)
    note("symbols", order0_bits(_histogram(row)) / 8)
    reader.take(reader.left, "raw bits")
    note("raw", float(reader.at - sum(parts.values())))
    density = tuple(
        EntryDensity(name, int(count), int(size))
        for name, count, size in zip(_names(part), counts, np.diff(part.bounds), strict=True)
    )
    return replace(
        brief,
        parts=parts,
        first=part.first,
        span=part.span,
        kept=int(counts.sum()),
        density=density,
        bound=bound,
    )


def _read_keep(reader: Reader, part: Range, modes: Modes, shared: Shared) -> tuple[Bools, float]:
    """Which coordinates are kept, and the entropy of what was coded to say so, in bytes."""
    keep = np.ones(part.span, np.bool_)
    keep[: part.prunable] = False
    bits = keep[: part.prunable]
    sizes = decode_changes(reader, part, modes.mask, shared, bits)
    least = 0.0
    if modes.mask != "known":
        held = held_bits(part, shared) if modes.mask == "swaps" else None
        least = _entropy(bits if held is None else np.concatenate([bits[held], bits[~held]]), sizes)
    if modes.mask != "coded":
        bits ^= held_bits(part, shared)
    return keep, least


def _entropy(bits: Bools, sizes: Ints) -> float:
    ones = counts_of(bits, sizes)
    return sum(binary_bits(int(one), int(size)) for one, size in zip(ones, sizes, strict=True)) / 8


def _histogram(row: Bytes8) -> Ints:
    """Count each byte value, in pieces because `bincount` widens what it counts."""
    out = np.zeros(256, np.int64)
    for first in range(0, row.size, CHUNK):
        out += np.bincount(row[first : first + CHUNK], minlength=256)
    return out


def _names(part: Range) -> list[str]:
    layout = part.layout
    starts = layout.wire_starts
    return [
        layout.names[entry]
        for number, entry in enumerate(layout.wire_entries)
        if layout.sizes[entry] and starts[number] < part.end and starts[number + 1] > part.first
    ]
