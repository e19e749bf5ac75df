"""A module as one flat vector (layout), and the models that come with the package.

A model is a function of the shape of one sample and the number of classes, with its options keyword-only.
One that names two more arguments, `tokens` and `labels`, receives the number of different tokens in the inputs,
and whether labels are one class a sample ("class"), one for each token ("tokens") or numbers ("numbers").
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from safari.kinds import Kind
from safari.models.huggingface import transformers
from safari.models.layout import Entry, Layout, frozen_tensors, prunable_parameters
from safari.models.lora import LoRALinear, add_lora, load_weights, lora
from safari.models.resnet import resnet18, resnet20
from safari.models.text import gru, lstm, transformer
from safari.models.zoo import cnn, fedawe_cnn, mlp, pfl_cnn

MODELS: Kind[Callable[..., nn.Module]] = Kind(
    "model",
    nn.Module,
    {
        "cnn": cnn,
        "fedawe_cnn": fedawe_cnn,
        "mlp": mlp,
        "pfl_cnn": pfl_cnn,
        "resnet20": resnet20,
        "resnet18": resnet18,
        "gru": gru,
        "lstm": lstm,
        "transformer": transformer,
        "transformers": transformers,
        "lora": lora,
    },
    tables=("model",),
    arguments=("shape", "classes"),
)
"""Models by name; the keyword-only parameters of each are its options."""

__all__ = [
    "MODELS",
    "Entry",
    "Layout",
    "LoRALinear",
    "add_lora",
    "cnn",
    "fedawe_cnn",
    "frozen_tensors",
    "gru",
    "load_weights",
    "lora",
    "lstm",
    "mlp",
    "pfl_cnn",
    "prunable_parameters",
    "resnet18",
    "resnet20",
    "transformer",
    "transformers",
]
