"""A sparse model as few bytes: frames, packets, and what they cost. Never imports torch."""

from safari.wire.frame import Decoded, Info, decode, encode
from safari.wire.layout import WireLayout
from safari.wire.shared import Shared, SharedKnowledgeError, reference_digest
from safari.wire.values import VALUE_MODES, Lossy

__all__ = [
    "VALUE_MODES",
    "Decoded",
    "Info",
    "Lossy",
    "Shared",
    "SharedKnowledgeError",
    "WireLayout",
    "decode",
    "encode",
    "reference_digest",
]
