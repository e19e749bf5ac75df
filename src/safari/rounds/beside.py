"""Encoding of what travels beside a model: an algorithm's vectors, and votes for weights to grow."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from safari.errors import SafariError
from safari.models import Layout
from safari.wire import WireLayout, decode, decode_votes, encode, encode_votes


def wire_layout(layout: Layout, *, buffers: bool = True) -> WireLayout:
    """A model's layout as the wire format knows it: names, sizes, what may be cut; perhaps without buffers.

    >>> wire_layout(Layout.of(torch.nn.Linear(3, 2)))
    WireLayout(names=('weight', 'bias'), sizes=(6, 2), prunable=(True, False))
    """
    if not isinstance(layout, Layout):
        raise SafariError(
            f"layout must be a safari.Layout, such as Layout.of(module), got {type(layout).__name__}"
        )
    entries = [e for e in layout.entries if buffers or e.kind != "buffer"]
    return WireLayout(
        [e.name for e in entries], [e.size for e in entries], [e.kind == "weight" for e in entries]
    )


def encode_vector(vector: Tensor, kept: Tensor, layout: Layout) -> bytes:
    """An algorithm's vector, exact: one over the parameters as a frame inside a mask, any other as float32.

    `kept` (`bool[parameters]`) says which numbers of such a vector travel; those of entries that cannot be
    pruned always do.
    """
    if len(vector) != layout.parameters:
        return vector.cpu().numpy().astype("<f4").tobytes()
    whole = kept | ~layout.prunable[: len(vector)].to(kept.device)
    numbers = torch.where(whole, vector, 0.0)
    wire = wire_layout(layout, buffers=False)
    return encode(numbers.cpu().numpy(), whole.cpu().numpy(), wire, values="absolute")


def decode_vector(data: bytes, size: int, layout: Layout) -> Tensor:
    """Decode a vector of `size` numbers from the bytes of `encode_vector`; SafariError if that fails."""
    if size == layout.parameters:
        return torch.from_numpy(decode(data, wire_layout(layout, buffers=False)).vector)
    if len(data) != 4 * size:
        raise SafariError(f"{size} numbers must have {4 * size} bytes, got {len(data)}")
    return torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32))


def rounded(votes: Tensor) -> Tensor:
    """Votes as they travel: a number of 16 bits each."""
    return votes.bfloat16().to(votes.dtype)


def votes_to_bytes(votes: Tensor, layout: Layout) -> bytes:
    """One client's votes, already `rounded`: the places that are not 0, and the numbers there."""
    row = votes.cpu().numpy()
    places = np.flatnonzero(row)
    return encode_votes(places, row[places], row.size, segments=_sizes(layout), mode="auto")


def votes_from_bytes(data: bytes, layout: Layout) -> Tensor:
    """Decode the bytes of `votes_to_bytes`; SafariError if that fails."""
    found = decode_votes(data, layout.size, with_values=True, segments=_sizes(layout))
    votes = torch.zeros(layout.size)
    if found.values is not None:
        votes[torch.from_numpy(found.indices)] = torch.from_numpy(found.values)
    return votes


def _sizes(layout: Layout) -> list[int]:
    return [e.size for e in layout.entries]
