"""The last mask sent to a client, kept in its own state: the next one may travel as its difference."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

from safari.errors import SafariError
from safari.wire import Shared, SharedKnowledgeError, WireLayout, decode
from safari.wire.layout import Bools

MEMORY = "safari.held-mask"
_BITS = "bits"


def remember_mask(state: RecordDict, mask: Tensor) -> None:
    """Store an announced mask in the client's state."""
    state[MEMORY] = ArrayRecord({_BITS: Array(np.packbits(mask.numpy()))})


def remembered_mask(state: Mapping[str, object], wire: WireLayout) -> Bools | None:
    """The stored mask; None if there is none that fits the layout."""
    record = state.get(MEMORY)
    if not isinstance(record, ArrayRecord) or _BITS not in record:
        return None
    bits = record[_BITS].numpy()
    if bits.dtype != np.uint8 or bits.shape != (-(-wire.d // 8),):
        return None
    mask = np.unpackbits(bits, count=wire.d).astype(np.bool_)
    return mask if wire.to_wire(mask)[wire.prunable_total :].all() else None


def decode_with_mask(frame: bytes, wire: WireLayout, state: Mapping[str, object]) -> tuple[Tensor, Tensor]:
    """Decode a model and its mask, which may be coded as changes to the mask that this client holds."""
    try:
        found = decode(frame, Shared(wire, None, remembered_mask(state, wire)))
    except SharedKnowledgeError as error:
        if error.what != "mask":
            raise
        raise SafariError(
            "the message builds on a mask that this client does not hold; it will get it in full"
        ) from error
    return torch.from_numpy(found.vector), torch.from_numpy(found.mask)
