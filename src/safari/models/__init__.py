"""A module as one flat vector (layout), and the models that come with the package (zoo)."""

from safari.models.layout import Entry, Layout, prunable_parameters
from safari.models.zoo import MODELS, cnn, fedawe_cnn, mlp, pfl_cnn, resnet20

__all__ = [
    "MODELS",
    "Entry",
    "Layout",
    "cnn",
    "fedawe_cnn",
    "mlp",
    "pfl_cnn",
    "prunable_parameters",
    "resnet20",
]
