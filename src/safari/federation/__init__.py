"""The server's side of a round, written once: what engines, Flower and any other transport share."""

from safari.federation.forms import Broadcast, Federation, State, Tensors, Uploads
from safari.federation.round import begin, cleared, cohort, finish, init, masks_of

__all__ = [
    "Broadcast",
    "Federation",
    "State",
    "Tensors",
    "Uploads",
    "begin",
    "cleared",
    "cohort",
    "finish",
    "init",
    "masks_of",
]
