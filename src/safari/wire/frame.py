"""Frames: a sparse model as one string of bytes, and back."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np

from safari.errors import SafariError, WireError, one_of
from safari.modes import ValueMode
from safari.wire.bits import Reader
from safari.wire.body import MASK_MODES, Model, Modes, Range, as_model, check_size, decode_body, whole
from safari.wire.budget import room_bits
from safari.wire.identity import Identity, Label, check_identity, read_label
from safari.wire.kept import Kept, Plan
from safari.wire.layout import LAYOUT_DIGEST_BYTES, Bools, Floats, WireLayout
from safari.wire.rounding import Lossy, plans
from safari.wire.shared import DIGEST_BYTES, Shared, SharedKnowledgeError, as_shared
from safari.wire.values import CODINGS, MAX_CODE, decoded_plan, encode_plan

MAGIC = b"SAF\x02"
CHECK_AT = 14
BODY_AT = 18
RELATIVE = 64
IDENTIFIED = 128


@dataclass(frozen=True)
class Info:
    """The head of a frame; `identity` is None where the frame states none."""

    modes: Modes
    layout_digest: bytes
    reference_digest: bytes
    mask_digest: bytes
    body_at: int
    identity: Label | None = None


@dataclass(frozen=True)
class Frame:
    """A frame's bytes, and the modes that were chosen for it."""

    data: bytes
    modes: Modes


@dataclass(frozen=True, eq=False)
class Decoded:
    """A model back from its bytes, in the order of the layout."""

    vector: Floats
    mask: Bools
    info: Info


def encode(
    vector: Floats,
    mask: Bools,
    layout: WireLayout | Shared,
    *,
    values: str = "auto",
    mask_mode: str = "auto",
    reference: Floats | None = None,
    predicted_mask: Bools | None = None,
    receiver_reference: bytes | None = None,
    lossy: Lossy | None = None,
    identity: Identity | None = None,
) -> bytes:
    """The model in as few bytes as the shared knowledge allows, exactly unless `values` names a lossy mode.

    Args:
        vector: `float32[d]`, 0 wherever the mask cuts.
        mask: `bool[d]`, True where a number is kept; numbers that are not prunable must be kept.
        layout: The layout, or everything both ends hold as one `Shared`.
        values: A value mode, or "auto": the shorter of the exact ones.
        mask_mode: "known", "flips", "coded" or "swaps"; "auto": the shortest of the first three; "best": of
            all, for masks that exchange some weights for others. (Sizes under "auto" stay what they were
            before there were swaps.)
        reference: A model that both ends hold; part of `Shared` where that is given.
        predicted_mask: A mask that both ends hold; part of `Shared` where that is given.
        receiver_reference: The digest of the reference that the receiver is known to hold. Where it differs
            from ours, no mode relies on the reference.
        lossy: Options of the lossy modes.
        identity: The client, round and model to state in the frame (20 bytes more); None: state nothing.

    >>> import numpy as np
    >>> layout = WireLayout(["w", "b"], [4, 1], [True, False])
    >>> vector, mask = np.array([0, 1.5, 0, -2, 3], np.float32), np.array([0, 1, 0, 1, 1], bool)
    >>> decode(encode(vector, mask, layout), layout).vector.tolist()
    [0.0, 1.5, 0.0, -2.0, 3.0]
    """
    shared = as_shared(layout, reference, predicted_mask)
    return encode_frame(
        vector,
        mask,
        shared,
        values=values,
        mask_mode=mask_mode,
        receiver_reference=receiver_reference,
        lossy=lossy,
        identity=identity,
    ).data


def encode_frame(
    vector: Floats,
    mask: Bools,
    shared: Shared,
    *,
    values: str = "auto",
    mask_mode: str = "auto",
    receiver_reference: bytes | None = None,
    lossy: Lossy | None = None,
    identity: Identity | None = None,
) -> Frame:
    """Encode a model as `encode` does, and return the frame with the modes that were chosen."""
    model = as_model(vector, mask, shared)
    choice = choose(model, values, mask_mode, receiver_reference, lossy or Lossy())
    return Frame(seal_frame(choice.modes, shared, choice.mask + choice.values, identity), choice.modes)


def decode(
    data: bytes,
    layout: WireLayout | Shared,
    *,
    reference: Floats | None = None,
    predicted_mask: Bools | None = None,
    expect: Identity | None = None,
) -> Decoded:
    """The model in a frame.

    Args:
        data: The bytes of one frame.
        layout: The layout, or everything both ends hold as one `Shared`.
        reference: As for `encode`.
        predicted_mask: As for `encode`.
        expect: The identity that the frame must state; None: any frame will do, and `info.identity` says
            what it states.

    Raises:
        IdentityError: The frame is of another client, round or model, or does not say.
        SharedKnowledgeError: The frame relies on something that this end does not hold.
        WireError: The bytes are no valid frame of this layout.
    """
    shared = as_shared(layout, reference, predicted_mask)
    reader, info = open_frame(data, shared, expect)
    if info.modes.values == "none":
        raise WireError("the frame must hold numbers, this one holds a mask alone", 4)
    layout = shared.layout
    keep, wire = decode_body(reader, whole(layout), info.modes, shared)
    return Decoded(layout.from_wire(wire), layout.from_wire(keep), info)


@dataclass(frozen=True)
class Choice:
    """The modes that were chosen for a model, what is said of its numbers, and the two parts of the body."""

    modes: Modes
    plan: Plan
    mask: bytes
    values: bytes


def choose(
    model: Model, values: str, mask_mode: str, receiver_reference: bytes | None, lossy: Lossy
) -> Choice:
    """The shortest of the modes that were asked for."""
    part = whole(model.layout)
    kept, found, relative = planned(model, values, mask_mode, receiver_reference, lossy)
    mask_mode, mask_part = choose_mask(model, part, mask_mode)
    tried = [(encode_plan(plan, kept), plan) for plan in found]
    coded, plan = min(tried, key=lambda pair: len(pair[0].data))
    coding = plan.coding if plan.sent is None else "sparse"
    modes = Modes(coding, mask_mode, relative and coding != "absolute", coded.code)
    return Choice(modes, plan, mask_part, coded.data)


def planned(
    model: Model, values: str, mask_mode: str, receiver_reference: bytes | None, lossy: Lossy
) -> tuple[Kept, list[Plan], bool]:
    """The kept numbers, what could be said of them in a mode, and whether that is relative to the reference.

    A difference without a usable reference falls back to absolute.
    """
    shared = model.shared
    if values not in tuple(ValueMode):
        raise SafariError(one_of("values", values, [mode.value for mode in ValueMode]))
    room = None
    if values == ValueMode.STEP and lossy.ratio:
        room = room_bits(shared.layout.d, lossy.ratio) - model.mask_bits(mask_mode)
    usable = shared.reference is not None and receiver_reference in (None, shared.reference_digest)
    if values == ValueMode.DIFFERENCE and not usable:
        values = ValueMode.ABSOLUTE
    kept = model.kept(whole(shared.layout), usable)
    return kept, plans(values, kept, lossy, room), usable


def roundtrip(
    vector: Floats, mask: Bools, layout: WireLayout | Shared, values: str, lossy: Lossy | None = None
) -> Floats:
    """Vector that a receiver decodes for these values: `decode(encode(...)).vector` without the bytes.

    >>> layout = WireLayout(["w"], [4], [True])
    >>> roundtrip(np.array([3, -1, 0, 2], np.float32), np.array([1, 1, 0, 1], bool), layout, "sign").tolist()
    [2.0, -2.0, 0.0, 2.0]
    """
    model = as_model(vector, mask, as_shared(layout, None, None))
    kept, found, _ = planned(model, values, "auto", None, lossy or Lossy())
    out = np.zeros(vector.size, np.float32)
    # Plans of which the shortest is taken say the same.
    out[model.places] = decoded_plan(found[0], kept)
    return out


def choose_mask(model: Model, part: Range, mode: str) -> tuple[str, bytes]:
    """The mask mode that `mode` stands for, and the mask in it."""
    if mode not in ("auto", "best", *MASK_MODES):
        raise SafariError(one_of("mask_mode", mode, ["auto", "best", *MASK_MODES]))
    asked = mode
    if mode in ("auto", "best") and model.shared.mask_bits is None:
        mode = "coded"
    if mode in ("auto", "best", "known"):
        flips = model.flipped.size
        if not flips:
            return "known", b""
        if mode == "known":
            raise SafariError(f"mask_mode 'known' needs mask equal to predicted_mask, {flips} bits differ")
    if mode not in ("auto", "best"):
        return mode, model.mask_bytes(part, mode)
    about = {name: model.mask_bits(name) for name in ("flips", "coded")}
    # Bitmaps with a pattern fall below their entropy, but hardly to a quarter of it.
    worth = [name for name, bits in about.items() if bits <= 4 * min(about.values())]
    if asked == "best" and "flips" in worth:
        worth.append("swaps")
    tried = {name: model.mask_bytes(part, name) for name in worth}
    best = min(tried, key=lambda name: len(tried[name]))
    return best, tried[best]


def mode_byte(modes: Modes) -> int:
    """Value mode, mask mode and the two flags in one byte."""
    flags = (RELATIVE if modes.relative else 0) | (IDENTIFIED if modes.identified else 0)
    return CODINGS.index(modes.values) | MASK_MODES.index(modes.mask) << 4 | flags


def parse_modes(byte: int, code: int, at: int) -> Modes:
    """The inverse of `mode_byte`, with every field checked; `at` is where the byte stands."""
    number, mask, relative = byte & 15, byte >> 4 & 3, bool(byte & RELATIVE)
    if number >= len(CODINGS):
        raise WireError(f"modes byte {byte:#04x} is not one of version 2", at)
    values = CODINGS[number]
    if values in ("absolute", "difference", "none") and relative != (values == "difference"):
        raise WireError(f"{values} mode must{'' if values == 'difference' else ' not'} be relative", at)
    if code > MAX_CODE[values]:
        raise WireError(f"code of {values} mode must be at most {MAX_CODE[values]}, got {code}", at)
    return Modes(values, MASK_MODES[mask], relative, code, bool(byte & IDENTIFIED))


def seal_frame(modes: Modes, shared: Shared, body: bytes, identity: Identity | None = None) -> bytes:
    """A frame around a body: magic, modes, digests, identity and the checksum of all of it."""
    modes = replace(modes, identified=identity is not None)
    head = MAGIC + bytes([mode_byte(modes), modes.code]) + shared.layout.digest
    rest = b"".join(
        [
            shared.reference_digest if modes.relative else b"",
            shared.mask_digest if modes.uses_mask else b"",
            identity.header if identity is not None else b"",
        ]
    )
    check = zlib.crc32(body, zlib.crc32(rest, zlib.crc32(head)))
    return b"".join([head, check.to_bytes(4, "little"), rest, body])


def open_frame(data: bytes, shared: Shared, expect: Identity | None) -> tuple[Reader, Info]:
    """A frame whose head is read and checked against what this end holds; the reader stands at the body."""
    check_size(len(data), shared.layout.d, len(shared.layout.sizes))
    reader = Reader(data)
    info = read_info(reader)
    check_identity(info.identity, expect, BODY_AT)
    check_shared(info, shared)
    return reader, info


def read_info(reader: Reader) -> Info:
    """The head of a frame; the reader then stands at its body."""
    if reader.take(4, "magic") != MAGIC:
        raise WireError(f"magic must be {MAGIC.hex()}, got {bytes(reader.data[:4]).hex()}", 0)
    byte, code = reader.take(2, "modes")
    modes = parse_modes(byte, code, 4)
    layout_digest = bytes(reader.take(LAYOUT_DIGEST_BYTES, "layout digest"))
    stated = int.from_bytes(reader.take(4, "checksum"), "little")
    found = zlib.crc32(reader.data[BODY_AT:], zlib.crc32(reader.data[:CHECK_AT]))
    if stated != found:
        raise WireError(f"checksum must be {found:08x}, got {stated:08x}", CHECK_AT)
    reference = bytes(reader.take(DIGEST_BYTES, "reference digest")) if modes.relative else b""
    mask = bytes(reader.take(DIGEST_BYTES, "mask digest")) if modes.uses_mask else b""
    identity = read_label(reader) if modes.identified else None
    return Info(modes, layout_digest, reference, mask, reader.at, identity)


def check_shared(info: Info, shared: Shared, needs_reference: bool = True) -> None:
    """Raise unless this end holds what the frame relies on."""
    if info.layout_digest != shared.layout.digest:
        ours, theirs = shared.layout.digest.hex(), info.layout_digest.hex()
        raise SharedKnowledgeError("layout", f"layout must be {theirs}, ours is {ours}", 6)
    if needs_reference and info.modes.relative and info.reference_digest != shared.reference_digest:
        ours, theirs = shared.reference_digest.hex() or "none", info.reference_digest.hex()
        raise SharedKnowledgeError("reference", f"reference must be {theirs}, ours is {ours}", BODY_AT)
    if info.modes.uses_mask and info.mask_digest != shared.mask_digest:
        ours, theirs = shared.mask_digest.hex() or "none", info.mask_digest.hex()
        at = BODY_AT + len(info.reference_digest)
        raise SharedKnowledgeError("mask", f"predicted mask must be {theirs}, ours is {ours}", at)
