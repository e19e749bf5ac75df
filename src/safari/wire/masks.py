"""A mask alone as bytes: for the broadcast of a new one, relative to the one that both ends hold."""

from __future__ import annotations

import numpy as np

from safari.errors import WireError
from safari.wire.body import Modes, as_model, decode_keep, whole
from safari.wire.frame import choose_mask, open_frame, seal_frame
from safari.wire.identity import Identity
from safari.wire.layout import Bools, WireLayout
from safari.wire.shared import Shared, as_shared


def encode_mask(
    mask: Bools,
    layout: WireLayout | Shared,
    held: Bools | None = None,
    *,
    mask_mode: str = "best",
    identity: Identity | None = None,
) -> bytes:
    """A frame without numbers.

    A model's frame carries its mask already, in the same modes; this is for messages that say only which
    weights are kept.

    Args:
        mask: `bool[d]`, True where a number is kept; numbers that are not prunable must be kept.
        layout: The layout, or a `Shared` whose predicted mask is the one that both ends hold.
        held: The mask that both ends hold, where `layout` is no `Shared`; None: there is none.
        mask_mode: As for `encode`.
        identity: As for `encode`.

    >>> layout = WireLayout(["w"], [4000], [True])
    >>> last = np.arange(4000) % 5 == 0
    >>> mask = last.copy()
    >>> mask[[0, 1, 500, 501]] ^= True
    >>> len(encode_mask(mask, layout)), len(encode_mask(mask, layout, last))
    (384, 34)
    """
    shared = as_shared(layout, None, held)
    model = as_model(np.zeros(shared.layout.d, np.float32), mask, shared)
    mode, body = choose_mask(model, whole(shared.layout), mask_mode)
    return seal_frame(Modes("none", mode, False, 0), shared, body, identity)


def decode_mask(
    data: bytes,
    layout: WireLayout | Shared,
    held: Bools | None = None,
    *,
    expect: Identity | None = None,
) -> Bools:
    """The mask in a frame of `encode_mask`; raises as `decode` does."""
    shared = as_shared(layout, None, held)
    reader, info = open_frame(data, shared, expect)
    if info.modes.values != "none":
        raise WireError(f"the frame must hold a mask alone, this one has numbers ({info.modes.values})", 4)
    keep = decode_keep(reader, whole(shared.layout), info.modes.mask, shared)
    if reader.left:
        raise WireError(f"the mask must end the frame, {reader.left} bytes are left", reader.at)
    return shared.layout.from_wire(keep)
