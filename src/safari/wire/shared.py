"""State that both ends of a link share: the layout, and perhaps a reference model and a predicted mask."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from safari.errors import SafariError, WireError
from safari.wire.layout import Bools, Floats, WireLayout

DIGEST_BYTES = 8
CONTEXT_BYTES = 8


class SharedKnowledgeError(WireError):
    """The sender relied on something that this end does not hold: ask for a frame without it.

    `what` is "layout", "reference", "mask", or "context" where a packet does not tell which.
    """

    def __init__(self, what: str, problem: str, offset: int):
        self.what = what
        super().__init__(problem, offset)


def reference_digest(vector: Floats) -> bytes:
    """The first 8 bytes of the SHA-256 of the vector as little-endian float32.

    >>> reference_digest(np.zeros(3, np.float32)).hex()
    '15ec7bf0b50732b4'
    """
    return hashlib.sha256(np.ascontiguousarray(vector, "<f4").data).digest()[:DIGEST_BYTES]


@dataclass(frozen=True, eq=False)
class Shared:
    """Shared knowledge with its digests, worked out once and used for many frames and packets.

    The arrays must not change while this is in use.
    """

    layout: WireLayout
    reference: Floats | None = None
    predicted_mask: Bools | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layout, WireLayout):
            raise SafariError(f"layout must be a WireLayout, got {_kind('layout', self.layout)}")
        if self.reference is not None:
            check_vector("reference", self.reference, self.layout)
        if self.predicted_mask is not None:
            check_mask("predicted_mask", self.predicted_mask, self.layout)

    @cached_property
    def reference_digest(self) -> bytes:
        """The digest of the reference, or nothing where there is none."""
        return b"" if self.reference is None else reference_digest(self.reference)

    @cached_property
    def mask_digest(self) -> bytes:
        """The digest of the predicted mask's prunable bits in wire order, or nothing where there is none."""
        if self.mask_bits is None:
            return b""
        return hashlib.sha256(np.packbits(self.mask_bits, bitorder="little").data).digest()[:DIGEST_BYTES]

    @cached_property
    def wire_reference(self) -> Floats | None:
        """The reference in wire order."""
        return None if self.reference is None else self.layout.to_wire(self.reference)

    @cached_property
    def mask_bits(self) -> Bools | None:
        """The prunable part of the predicted mask in wire order."""
        if self.predicted_mask is None:
            return None
        return self.layout.to_wire(self.predicted_mask)[: self.layout.prunable_total]

    def context(self, with_reference: bool, with_mask: bool) -> bytes:
        """Eight bytes for all that a packet relies on: one travels, all of them go into its checksum."""
        parts = (self.reference_digest if with_reference else b"", self.mask_digest if with_mask else b"")
        return hashlib.sha256(self.layout.digest + parts[0] + parts[1]).digest()[:CONTEXT_BYTES]

    @cached_property
    def contexts(self) -> dict[tuple[bool, bool], bytes]:
        """`context` for each of the four ways to rely on it."""
        return {(r, m): self.context(r, m) for r in (False, True) for m in (False, True)}


def as_shared(layout: WireLayout | Shared, reference: Floats | None, mask: Bools | None) -> Shared:
    """A layout and loose arrays as shared knowledge; a `Shared` goes through as it is."""
    if isinstance(layout, WireLayout):
        return Shared(layout, reference, mask)
    if not isinstance(layout, Shared):
        raise SafariError(f"layout must be a WireLayout or Shared, got {_kind('layout', layout)}")
    if reference is not None or mask is not None:
        raise SafariError("reference and predicted_mask belong into Shared when Shared is given")
    return layout


def check_vector(field: str, vector: Floats, layout: WireLayout) -> None:
    """Raise unless it is a float32 vector of the layout's length."""
    if not isinstance(vector, np.ndarray):
        raise SafariError(f"{field} must be a numpy array float32[{layout.d}], got {_kind(field, vector)}")
    if vector.dtype != np.float32 or vector.shape != (layout.d,):
        raise SafariError(f"{field} must be float32[{layout.d}], got {vector.dtype}{list(vector.shape)}")


def check_mask(field: str, mask: Bools, layout: WireLayout) -> None:
    """Raise unless it is a bool vector of the layout's length that keeps every dense number."""
    if not isinstance(mask, np.ndarray):
        raise SafariError(f"{field} must be a numpy array bool[{layout.d}], got {_kind(field, mask)}")
    if mask.dtype != np.bool_ or mask.shape != (layout.d,):
        raise SafariError(f"{field} must be bool[{layout.d}], got {mask.dtype}{list(mask.shape)}")
    if not layout.to_wire(mask)[layout.prunable_total :].all():
        raise SafariError(f"{field} must keep every number of the entries that are not prunable")


def _kind(field: str, thing: object) -> str:
    """Describe a value passed in place of an array or a layout, with what to pass if that can be guessed.

    Decided by the names of types alone: nothing here imports torch.
    """
    kind = type(thing)
    if kind.__module__.partition(".")[0] == "torch" and hasattr(thing, "numpy"):
        return f"a torch tensor; pass {field}.detach().cpu().numpy()"
    if kind.__module__.startswith("safari.models"):
        return "a safari.Layout; pass safari.wire_layout(layout)"
    return (
        "None" if thing is None else f"{'an' if kind.__name__[0].lower() in 'aeiou' else 'a'} {kind.__name__}"
    )
