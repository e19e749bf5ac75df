"""A sparse model as few bytes: frames, packets, and what they cost. Never imports torch."""

from safari.wire.frame import Decoded, Info, decode, encode
from safari.wire.layout import WireLayout
from safari.wire.packet import Merged, Part, covered, decode_packet, merge, packets
from safari.wire.shared import Shared, SharedKnowledgeError, reference_digest
from safari.wire.values import VALUE_MODES, Lossy

__all__ = [
    "VALUE_MODES",
    "Decoded",
    "Info",
    "Lossy",
    "Merged",
    "Part",
    "Shared",
    "SharedKnowledgeError",
    "WireLayout",
    "covered",
    "decode",
    "decode_packet",
    "encode",
    "merge",
    "packets",
    "reference_digest",
]
