"""SAFARI: federated learning that keeps training when the network loses most of the updates."""

from safari.aggregation import Compensation, Decision, Outcome, Round, Server, stand_in
from safari.config import Config, parse
from safari.data import Data
from safari.engine import resume, run
from safari.errors import SafariError
from safari.links import Link
from safari.models import Layout
from safari.pruning import Pruner, prune
from safari.version import __version__

__all__ = [
    "Compensation",
    "Config",
    "Data",
    "Decision",
    "Layout",
    "Link",
    "Outcome",
    "Pruner",
    "Round",
    "SafariError",
    "Server",
    "__version__",
    "parse",
    "prune",
    "resume",
    "run",
    "stand_in",
]
