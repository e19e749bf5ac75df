"""Link models: which messages and packets arrive, up and down. Seeded, and unknown to the server."""

from collections.abc import Callable

from safari.links.checked import check_arrays, checked_link, link_of
from safari.links.link import Link, Setting, check_length, from_probability, probabilities, spread
from safari.links.models import LINKS
from safari.links.packetisation import Packetisation, coverage, range_coverage
from safari.links.packets import PacketLink, lossy, none
from safari.links.recorded import recorded
from safari.links.trace import read_trace, trace

PACKET_LINKS: dict[str, Callable[..., PacketLink]] = {"none": none, "lossy": lossy, "recorded": recorded}

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
    "range_coverage",
    "read_trace",
    "spread",
    "trace",
]
