"""A sparse model as few bytes: frames, packets, and what they cost. Never imports torch."""

from safari.modes import ValueMode
from safari.wire.account import Bounds, Cost, bounds, costs, plain_costs
from safari.wire.feedback import settle, with_residual
from safari.wire.frame import Decoded, Frame, Info, decode, encode, encode_frame, roundtrip
from safari.wire.identity import Identity, IdentityError, Label
from safari.wire.inspection import EntryDensity, Inspection, inspect
from safari.wire.layout import WireLayout
from safari.wire.masks import decode_mask, encode_mask
from safari.wire.packet import Merged, Part, covered, decode_packet, merge, packet_label, packets
from safari.wire.rounding import Lossy
from safari.wire.rounding.levels import adaquant_levels
from safari.wire.shared import Shared, SharedKnowledgeError, reference_digest
from safari.wire.votes import Votes, decode_votes, encode_votes

__all__ = [
    "Bounds",
    "Cost",
    "Decoded",
    "EntryDensity",
    "Frame",
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
    "ValueMode",
    "Votes",
    "WireLayout",
    "adaquant_levels",
    "bounds",
    "costs",
    "covered",
    "decode",
    "decode_mask",
    "decode_packet",
    "decode_votes",
    "encode",
    "encode_frame",
    "encode_mask",
    "encode_votes",
    "inspect",
    "merge",
    "packet_label",
    "packets",
    "plain_costs",
    "reference_digest",
    "roundtrip",
    "settle",
    "with_residual",
]
