"""A range of wire coordinates as bytes: which are kept, then their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from safari.errors import SafariError, WireError
from safari.wire.bitmap import decode_bitmap, encode_bitmap
from safari.wire.bits import CHUNK, Reader
from safari.wire.budget import coded_bits
from safari.wire.kept import Kept
from safari.wire.layout import Bools, Floats, Ints, WireLayout
from safari.wire.shared import Shared, check_mask, check_vector
from safari.wire.values import value_reader

MASK_MODES = ("known", "flips", "coded", "swaps")
# How many coordinates are counted at a time to find out which to decode together.
WINDOW = 4096
# The most bytes that a message may have: for its head, for each entry and for each number.
HEAD_ROOM, ENTRY_ROOM, NUMBER_ROOM = 1024, 64, 8


@dataclass(frozen=True)
class Modes:
    """Modes in which a body was written.

    `relative`: the numbers are differences to the reference. `identified`: the head states an identity.
    """

    values: str
    mask: str
    relative: bool
    code: int
    identified: bool = False

    @property
    def uses_mask(self) -> bool:
        """Whether the receiver needs the predicted mask."""
        return self.mask != "coded"


@dataclass(frozen=True)
class Range:
    """Wire coordinates `first` to `first + span`, and the sizes of what lies in them."""

    layout: WireLayout
    first: int
    span: int

    @property
    def end(self) -> int:
        """One past the last coordinate."""
        return self.first + self.span

    @cached_property
    def prunable(self) -> int:
        """Number of prunable coordinates; they come first."""
        return max(0, min(self.end, self.layout.prunable_total) - self.first)

    @cached_property
    def entries(self) -> slice:
        """Which entries have coordinates here, in wire order and without the empty ones."""
        edges = self.layout.wire_edges
        lo = int(np.searchsorted(edges, self.first, "right")) - 1
        return slice(lo, int(np.searchsorted(edges, self.end, "left")) if self.span else lo)

    @cached_property
    def bounds(self) -> Ints:
        """Start of each entry relative to the range, and the end of the last."""
        inner = self.layout.wire_edges[self.entries.start : self.entries.stop + 1] - self.first
        return np.clip(inner, 0, self.span)

    @cached_property
    def segments(self) -> Ints:
        """Number of prunable coordinates that each of these entries has in the range."""
        return np.diff(self.bounds[self.bounds <= self.prunable])


def whole(layout: WireLayout) -> Range:
    """The range of a frame."""
    return Range(layout, 0, layout.d)


@dataclass(frozen=True)
class Model:
    """Model to encode, checked: the vector as it was passed, and the mask in wire order."""

    shared: Shared
    vector: Floats
    keep: Bools

    @property
    def layout(self) -> WireLayout:
        """The layout of the vector."""
        return self.shared.layout

    @property
    def bits(self) -> Bools:
        """The prunable part of the mask."""
        return self.keep[: self.layout.prunable_total]

    @cached_property
    def coordinates(self) -> Ints:
        """The kept wire coordinates."""
        return np.flatnonzero(self.keep)

    @cached_property
    def places(self) -> Ints:
        """Indices of the kept coordinates in the vector."""
        return self.layout.places(self.coordinates)

    @cached_property
    def flips(self) -> Bools:
        """Prunable coordinates at which the mask differs from the predicted one, as booleans."""
        predicted = self.shared.mask_bits
        if predicted is None:
            raise SafariError("mask_mode 'known', 'flips' or 'swaps' needs predicted_mask")
        return self.bits ^ predicted

    @cached_property
    def flipped(self) -> Ints:
        """Prunable coordinates at which the mask differs from the predicted one, as indices."""
        return np.flatnonzero(self.flips)

    @cached_property
    def values(self) -> Floats:
        """The kept numbers."""
        return self.vector.take(self.places)

    @cached_property
    def base(self) -> Floats | None:
        """Numbers of the reference at the kept coordinates; None without a reference."""
        reference = self.shared.reference
        return None if reference is None else reference.take(self.places)

    def rows(self, part: Range) -> slice:
        """Which of the kept coordinates lie in a range."""
        lo, hi = np.searchsorted(self.coordinates, [part.first, part.end]).tolist()
        return slice(lo, hi)

    def kept(self, part: Range, relative: bool) -> Kept:
        """The kept numbers of a range."""
        rows = self.rows(part)
        here = self.coordinates[rows]
        edges = np.searchsorted(here, part.bounds + part.first)
        steering = int(np.searchsorted(here, self.layout.prunable_total))
        base = self.base[rows] if relative and self.base is not None else None
        return Kept(self.values[rows], base, np.diff(edges), steering)

    def mask_bits(self, mode: str) -> float:
        """About how many bits the mask takes in a mode, "auto" included; of swaps a little too many."""
        predicted = self.shared.mask_bits is not None
        ways = [self.flipped] if predicted and mode != "coded" else []
        if ways and not self.flipped.size:
            return 0.0
        if mode in ("auto", "best", "coded"):
            ways.append(self.coordinates)
        starts = self.layout.wire_starts[: 1 + sum(self.layout.prunable)]
        return coded_bits([np.diff(np.searchsorted(way, starts)) for way in ways], starts)

    def mask_bytes(self, part: Range, mode: str) -> bytes:
        """The mask of a range."""
        if mode == "known":
            return b""
        here = slice(part.first, part.first + part.prunable)
        if mode == "swaps":
            flips, held = self.flips[here], held_bits(part, self.shared)
            bits = np.concatenate([flips[held], flips[~held]])
            return encode_bitmap(bits, swap_segments(held, part.segments))
        bits = self.bits if mode == "coded" else self.flips
        return encode_bitmap(bits[here], part.segments)


def as_model(vector: Floats, mask: Bools, shared: Shared) -> Model:
    """The arguments of an encoder, checked."""
    layout = shared.layout
    check_vector("vector", vector, layout)
    check_mask("mask", mask, layout)
    model = Model(shared, vector, layout.to_wire(mask))
    # Comparing first is several times faster than counting nonzero floats.
    if np.count_nonzero(vector != 0) != np.count_nonzero(model.values != 0):
        raise SafariError("vector must be 0 wherever the mask cuts")
    return model


def decode_body(reader: Reader, part: Range, modes: Modes, shared: Shared) -> tuple[Bools, Floats]:
    """Which coordinates of the range are kept, and their numbers with 0 where cut.

    Beside the result, 5 bytes a number, this takes a byte for each symbol and a constant: the numbers are
    decoded a chunk at a time.
    """
    keep = decode_keep(reader, part, modes.mask, shared)
    reference = None
    if modes.relative and shared.wire_reference is not None:
        reference = shared.wire_reference[part.first : part.end]
    counts = kept_by_entry(keep, part)
    values = value_reader(modes.values, modes.code, modes.relative, reader, counts)
    vector = np.zeros(part.span, np.float32)
    for window in _windows(keep):
        places = np.flatnonzero(keep[window])
        base = None if reference is None else reference[window].take(places)
        vector[window][places] = values.take(places.size, base)
    values.finish()
    return keep, vector


def decode_keep(reader: Reader, part: Range, mode: str, shared: Shared) -> Bools:
    """Which coordinates of the range are kept."""
    keep = np.zeros(part.span, np.bool_)
    decode_changes(reader, part, mode, shared, keep[: part.prunable])
    if mode != "coded":
        keep[: part.prunable] ^= held_bits(part, shared)
    keep[part.prunable :] = True
    return keep


def decode_changes(reader: Reader, part: Range, mode: str, shared: Shared, bits: Bools) -> Ints:
    """Decode the bitmap of the prunable coordinates into `bits`: the mask, or changes to the predicted one.

    Returns the sizes of the segments that were coded.
    """
    if mode == "swaps":
        held = held_bits(part, shared)
        sizes = swap_segments(held, part.segments)
        both = decode_bitmap(reader, sizes)
        count = int(np.count_nonzero(held))
        bits[held] = both[:count]
        bits[~held] = both[count:]
        return sizes
    if mode != "known":
        decode_bitmap(reader, part.segments, bits)
    return part.segments


def held_bits(part: Range, shared: Shared) -> Bools:
    """The prunable bits of the mask that both ends hold."""
    if shared.mask_bits is None:
        raise SafariError("this mask_mode needs predicted_mask")
    return shared.mask_bits[part.first : part.first + part.prunable]


def swap_segments(held: Bools, sizes: Ints) -> Ints:
    """The segments of the mode swaps: all that the held mask keeps, then what it cuts of each entry.

    The share of kept weights that a policy exchanges is about the same in every layer, the share of cut ones
    that come in for them depends on the layer's density.
    """
    edges = pairwise([0, *np.cumsum(sizes).tolist()])
    kept = np.array([np.count_nonzero(held[lo:hi]) for lo, hi in edges], np.int64)
    return np.concatenate([[kept.sum()], sizes - kept]).astype(np.int64)


def kept_by_entry(keep: Bools, part: Range) -> Ints:
    """Number of coordinates kept of each entry in the range."""
    edges = pairwise(part.bounds.tolist())
    return np.array([np.count_nonzero(keep[lo:hi]) for lo, hi in edges], np.int64)


def _windows(keep: Bools) -> Iterator[slice]:
    """Neighbouring slices that cover everything kept, with about `CHUNK` kept numbers in each."""
    blocks = range(0, keep.size, WINDOW)
    start, kept = 0, 0
    for first in blocks:
        here = int(np.count_nonzero(keep[first : first + WINDOW]))
        if kept and kept + here > CHUNK:
            yield slice(start, first)
            start, kept = first, 0
        kept += here
    if kept:
        yield slice(start, keep.size)


def check_size(size: int, span: int, entries: int) -> None:
    """Raise where a message is longer than any encoder has reason to make it, before it is looked at.

    Plain float32 take 4 bytes a number, and no mode of the encoder more than 5.
    """
    most = HEAD_ROOM + ENTRY_ROOM * entries + NUMBER_ROOM * span
    if size > most:
        problem = f"a message about {span} numbers in {entries} entries must be at most {most} bytes"
        raise WireError(f"{problem}, got {size}", most)
