"""Who arrives: links up and down, seeded, unknown to the server by construction."""

from safari.links.checked import check_arrays, checked_link, link_of
from safari.links.link import Link, Setting, check_length, from_probability, probabilities, spread
from safari.links.models import LINKS
from safari.links.packetisation import Packetisation, coverage
from safari.links.packets import PACKET_LINKS, PacketLink
from safari.links.trace import read_trace, trace

__all__ = [
    "LINKS",
    "PACKET_LINKS",
    "Link",
    "PacketLink",
    "Packetisation",
    "Setting",
    "check_arrays",
    "check_length",
    "checked_link",
    "coverage",
    "from_probability",
    "link_of",
    "probabilities",
    "read_trace",
    "spread",
    "trace",
]
