"""Client algorithms, one file a paper, by the name that a config gives them."""

from collections.abc import Callable

from safari.training.algorithm import ClientAlgorithm
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

CLIENTS: dict[str, Callable[..., ClientAlgorithm]] = {
    "fedavg": fedavg,
    "calibrated": calibrated,
    "masked-loss": masked_loss,
    "fedprox": fedprox,
    "scaffold": scaffold,
    "mime": mime,
    "feddyn": feddyn,
    "fednova": fednova,
    "dane": dane,
    "bvr-l-sgd": bvr_l_sgd,
    "fedpbc": fedpbc,
    "fedawe": fedawe,
}

__all__ = [
    "CLIENTS",
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
