"""Who arrives: links up and down, seeded, unknown to the server by construction."""

from safari.links.checked import check_arrays, checked_link, link_of
from safari.links.link import Link, Setting, check_length, from_probability, probabilities, spread
from safari.links.models import LINKS
from safari.links.trace import read_trace, trace

__all__ = [
    "LINKS",
    "Link",
    "Setting",
    "check_arrays",
    "check_length",
    "checked_link",
    "from_probability",
    "link_of",
    "probabilities",
    "read_trace",
    "spread",
    "trace",
]
