"""A sparse model as few bytes: frames, packets, and what they cost. Never imports torch."""

from safari.wire.account import Bounds, Cost, bounds, costs, plain_costs
from safari.wire.feedback import settle, with_residual
from safari.wire.frame import Decoded, Info, decode, encode
from safari.wire.identity import Identity, IdentityError, Label
from safari.wire.inspection import EntryDensity, Inspection, inspect
from safari.wire.layout import WireLayout
from safari.wire.packet import Merged, Part, covered, decode_packet, merge, packet_label, packets
from safari.wire.shared import Shared, SharedKnowledgeError, reference_digest
from safari.wire.values import VALUE_MODES, Lossy

__all__ = [
    "VALUE_MODES",
    "Bounds",
    "Cost",
    "Decoded",
    "EntryDensity",
    "Identity",
    "IdentityError",
    "Info",
    "Inspection",
    "Label",
    "Lossy",
    "Merged",
    "Part",
    "Shared",
    "SharedKnowledgeError",
    "WireLayout",
    "bounds",
    "costs",
    "covered",
    "decode",
    "decode_packet",
    "encode",
    "inspect",
    "merge",
    "packet_label",
    "packets",
    "plain_costs",
    "reference_digest",
    "settle",
    "with_residual",
]
