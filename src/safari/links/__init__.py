"""Link models: which messages and packets arrive, up and down. Seeded, and unknown to the server."""

from safari.links.kinds import LINKS, PACKET_LINKS, link_contract
from safari.links.link import Link, Setting, check_length, from_probability, probabilities, spread
from safari.links.packetisation import Packetisation, coverage, range_coverage
from safari.links.packets import PacketLink
from safari.links.trace import read_trace, trace

__all__ = [
    "LINKS",
    "PACKET_LINKS",
    "Link",
    "PacketLink",
    "Packetisation",
    "Setting",
    "check_length",
    "coverage",
    "from_probability",
    "link_contract",
    "probabilities",
    "range_coverage",
    "read_trace",
    "spread",
    "trace",
]
