"""Packets: a model as datagrams, each of which gives its coordinates and numbers without the others."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from safari.errors import SafariError, WireError
from safari.wire.bits import Reader, varint
from safari.wire.body import Model, Modes, Range, as_model, check_size, decode_body
from safari.wire.frame import Choice, choose, mode_byte, parse_modes
from safari.wire.identity import Identity, IdentityError, Label, check_identity, read_packet_label
from safari.wire.layout import Bools, Floats, Ints, WireLayout
from safari.wire.rounding import Lossy
from safari.wire.shared import Shared, SharedKnowledgeError, as_shared
from safari.wire.values import encode_plan

# The first byte: this in its high half, the code of the alphabet in its low one.
MAGIC = 0xB0
CONTEXT_AT = 2
CHECK_AT = 3
HEAD_BYTES = 7
DATAGRAM = 1200
# Packets are aimed a little below the limit: a second try costs more than the bytes left unused.
AIM = 0.985


@dataclass(frozen=True, eq=False)
class Part:
    """Content of one packet: `vector` and `mask` over the wire coordinates `first` to `first + span`.

    `identity` is the one that the packet was checked against, None where it states none.
    """

    layout: WireLayout
    first: int
    vector: Floats
    mask: Bools
    modes: Modes
    identity: Identity | None = None

    @cached_property
    def positions(self) -> Ints:
        """The places of these coordinates in the flat vector."""
        return self.layout.positions(self.first, self.mask.size)


@dataclass(frozen=True, eq=False)
class Merged:
    """Packets put together: 0 and False where `arrived` is False."""

    vector: Floats
    mask: Bools
    arrived: Bools


def packets(
    vector: Floats,
    mask: Bools,
    layout: WireLayout | Shared,
    *,
    limit: int = DATAGRAM,
    values: str = "auto",
    mask_mode: str = "auto",
    reference: Floats | None = None,
    predicted_mask: Bools | None = None,
    receiver_reference: bytes | None = None,
    lossy: Lossy | None = None,
    identity: Identity | None = None,
) -> list[bytes]:
    """The model as datagrams of at most `limit` bytes; the other arguments are those of `encode`.

    `identity` takes 5 to 9 bytes of each.

    >>> layout = WireLayout(["w"], [5000], [True])
    >>> vector = np.linspace(-1, 1, 5000, dtype=np.float32)
    >>> datagrams = packets(vector, vector != 0, layout)
    >>> max(map(len, datagrams)) <= 1200
    True
    >>> merged = merge((decode_packet(data, layout) for data in datagrams[1:]), layout)
    >>> bool((merged.vector == vector)[merged.arrived].all()), bool(merged.arrived.all())
    (True, False)
    """
    model = as_model(vector, mask, as_shared(layout, reference, predicted_mask))
    choice = choose(model, values, mask_mode, receiver_reference, lossy or Lossy())
    choice = replace(choice, modes=replace(choice.modes, identified=identity is not None))
    whole = model.layout
    weights = _weights(model, choice)
    out: list[bytes] = []
    first, correction = 0, 1.0
    while first < whole.d or not out:
        budget = AIM * limit / correction
        while True:
            end = int(np.searchsorted(weights, weights[first] + budget))
            part = Range(whole, first, min(max(end - 1, first + 1), whole.d) - first)
            data = _seal(model, part, choice, identity)
            guess = float(weights[part.end] - weights[first])
            if len(data) <= limit:
                break
            if part.span <= 1:
                raise SafariError(f"limit must be at least {len(data)} for this model, got {limit}")
            budget = min(budget, guess) * AIM * limit / len(data)
        if part.end < whole.d:
            correction = len(data) / guess
        out.append(data)
        first = part.end
    return out


def decode_packet(
    data: bytes,
    layout: WireLayout | Shared,
    *,
    reference: Floats | None = None,
    predicted_mask: Bools | None = None,
    expect: Identity | None = None,
) -> Part:
    """Decode one datagram; for many of them make a `Shared` once, so that its digests are kept.

    A packet that states an identity is checked against `expect` and cannot be read without it, because its
    checksum covers the model's digest too. `packet_label` says which identity to expect.
    """
    shared = as_shared(layout, reference, predicted_mask)
    reader = Reader(data)
    check_size(len(data), shared.layout.d, len(shared.layout.sizes))
    modes, part = read_packet_head(reader, shared, expect)
    check_size(len(data), part.span, part.entries.stop - part.entries.start)
    if modes.values == "none":
        raise WireError("the packet must hold numbers, this one holds a mask alone", 1)
    keep, vector = decode_body(reader, part, modes, shared)
    return Part(shared.layout, part.first, vector, keep, modes, expect)


def packet_label(data: bytes) -> Label | None:
    """The client and round that a datagram states, so that a receiver can look up what to check it against.

    Nothing is checked beyond the head's own form; None where no identity is stated.
    """
    return _skip_head(Reader(data))


def covered(data: bytes, layout: WireLayout | Shared) -> Ints:
    """The places in the flat vector that a datagram of one's own covers: its head is read, not checked."""
    whole = as_shared(layout, None, None).layout
    return whole.positions(*covered_range(data, whole))


def covered_range(data: bytes, layout: WireLayout) -> tuple[int, int]:
    """The first wire coordinate that a datagram of one's own covers, and how many."""
    reader = Reader(data)
    _skip_head(reader)
    part = _read_range(reader, layout)
    return part.first, part.span


def merge(parts: Iterable[Part], layout: WireLayout | Shared) -> Merged:
    """Any packets of one model, in any order; a coordinate that comes twice takes the later.

    Raises `SafariError` where two packets belong to different identities, or one to another layout.
    """
    whole = as_shared(layout, None, None).layout
    vector = np.zeros(whole.d, np.float32)
    flags = np.zeros((2, whole.d), np.bool_)
    identity: Identity | None = None
    for number, part in enumerate(parts):
        if number and part.identity != identity:
            raise SafariError(f"packets to merge must share one identity, got {identity} and {part.identity}")
        if part.layout is not whole and part.layout != whole:
            raise SafariError("packets to merge must be of the layout given")
        identity = part.identity
        span = slice(part.first, part.first + part.mask.size)
        vector[span] = part.vector
        flags[0, span] = part.mask
        flags[1, span] = True
    return Merged(whole.from_wire(vector), whole.from_wire(flags[0]), whole.from_wire(flags[1]))


def read_packet_head(reader: Reader, shared: Shared, expect: Identity | None = None) -> tuple[Modes, Range]:
    """The head of a packet, checked against what this end holds; the reader then stands at the body."""
    modes = _read_modes(reader)
    context = reader.byte("context")
    stated = int.from_bytes(reader.take(4, "checksum"), "little")
    label = read_packet_label(reader) if modes.identified else None
    if label is not None and expect is None:
        problem = f"the packet is of client {label.client.hex()}, round {label.round}: expect must name it"
        raise IdentityError("identity", problem, HEAD_BYTES)
    check_identity(label, expect, HEAD_BYTES)
    ours = _context(shared, modes, expect)
    lacks = (modes.relative and shared.reference is None) or (
        modes.uses_mask and shared.predicted_mask is None
    )
    if lacks or context != ours[0]:
        needs = ["layout"] + ["reference"] * modes.relative + ["predicted mask"] * modes.uses_mask
        needs += ["identity's model"] * modes.identified
        ours_is = "incomplete" if lacks else f"{ours[0]:02x}"
        problem = f"context of {', '.join(needs)} must be {context:02x}, ours is {ours_is}"
        raise SharedKnowledgeError("context", problem, CONTEXT_AT)
    found = _check(ours, reader.data[:CHECK_AT], reader.data[HEAD_BYTES:])
    if stated != found:
        raise WireError(f"checksum must be {found:08x}, got {stated:08x}", CHECK_AT)
    return modes, _read_range(reader, shared.layout)


def _skip_head(reader: Reader) -> Label | None:
    """Read the head without checking it, up to the range; returns the label, where one is stated."""
    modes = _read_modes(reader)
    reader.take(HEAD_BYTES - reader.at, "head")
    return read_packet_label(reader) if modes.identified else None


def _read_modes(reader: Reader) -> Modes:
    magic = reader.byte("magic")
    if magic & 0xF0 != MAGIC:
        raise WireError(f"magic must be {MAGIC:#x}, got {magic & 0xF0:#x}", 0)
    return parse_modes(reader.byte("modes"), magic & 0x0F, 1)


def _context(shared: Shared, modes: Modes, identity: Identity | None) -> bytes:
    """Eight bytes for everything that a packet relies on."""
    plain = shared.contexts[modes.relative, modes.uses_mask]
    return plain if identity is None else identity.context(plain)


def _check(context: bytes, head: bytes | memoryview, rest: bytes | memoryview) -> int:
    return zlib.crc32(rest, zlib.crc32(head, zlib.crc32(context)))


def _read_range(reader: Reader, layout: WireLayout) -> Range:
    first = reader.varint("first coordinate", layout.d)
    at = reader.at
    span = reader.varint("span", layout.d - first)
    if span == 0 and layout.d:
        raise WireError("span must be at least 1, got 0", at)
    return Range(layout, first, span)


def _seal(model: Model, part: Range, choice: Choice, identity: Identity | None) -> bytes:
    modes = choice.modes
    plan = choice.plan.part(part.entries, model.rows(part))
    coded = encode_plan(plan, model.kept(part, modes.relative))
    context = _context(model.shared, modes, identity)
    head = bytes([MAGIC | coded.code, mode_byte(modes), context[0]])
    label = b"" if identity is None else identity.packet_header
    where = varint(part.first) + varint(part.span)
    rest = label + where + model.mask_bytes(part, modes.mask) + coded.data
    return head + _check(context, head, rest).to_bytes(4, "little") + rest


def _weights(model: Model, choice: Choice) -> npt.NDArray[np.float64]:
    """About how many bytes the coordinates before each one take, from what the whole model took."""
    layout = model.layout
    out = np.full(layout.d + 1, 1e-3)
    out[0] = 0
    out[1 + model.coordinates] += len(choice.values) / max(model.coordinates.size, 1)
    prunable = out[1 : layout.prunable_total + 1]
    if choice.modes.mask in ("flips", "swaps"):
        prunable[model.flips] += len(choice.mask) / max(int(model.flips.sum()), 1)
    elif choice.modes.mask == "coded":
        prunable += len(choice.mask) / max(layout.prunable_total, 1)
    return np.cumsum(out)
