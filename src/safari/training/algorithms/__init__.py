"""Client algorithms, one file a paper."""

from safari.training.algorithms.bvr_l_sgd import bvr_l_sgd
from safari.training.algorithms.dane import dane
from safari.training.algorithms.fedavg import fedavg
from safari.training.algorithms.fedawe import fedawe
from safari.training.algorithms.feddyn import feddyn
from safari.training.algorithms.fedlc import calibrated
from safari.training.algorithms.fednova import fednova
from safari.training.algorithms.fedpbc import fedpbc
from safari.training.algorithms.fedprox import fedprox
from safari.training.algorithms.heterofl import masked_loss
from safari.training.algorithms.mime import mime
from safari.training.algorithms.scaffold import scaffold

__all__ = [
    "bvr_l_sgd",
    "calibrated",
    "dane",
    "fedavg",
    "fedawe",
    "feddyn",
    "fednova",
    "fedpbc",
    "fedprox",
    "masked_loss",
    "mime",
    "scaffold",
]
