"""Small models for pictures and features."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from safari.errors import ConfigError
from safari.models.checks import MOST_LAYERS, need_images, need_positive


def cnn(shape: tuple[int, ...], classes: int, *, width: int = 16) -> nn.Module:
    """A small CNN for small pictures: two 3x3 convolutions, pooling, one hidden layer; for 8x8 digits.

    >>> sum(p.numel() for p in cnn((1, 8, 8), 10).parameters())
    38282
    """
    need_images("cnn", shape, smallest=4)
    need_positive("width", width)
    channels, height, wide = shape
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (height // 2) * (wide // 2), 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, classes),
    )


def pfl_cnn(shape: tuple[int, ...], classes: int, *, hidden: int = 128) -> nn.Module:
    """The small CNN of pfl-research's CIFAR-10 benchmark: two 3x3 convolutions, dropout, one hidden layer.

    With pooling after the convolutions; for 3x32x32 pictures.

    >>> sum(p.numel() for p in pfl_cnn((3, 32, 32), 10).parameters())
    1626442
    """
    need_images("pfl_cnn", shape, smallest=6)
    need_positive("hidden", hidden)
    channels, height, wide = shape
    module = nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * ((height - 4) // 2) * ((wide - 4) // 2), hidden),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(hidden, classes),
    )
    for layer in module:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return module


def fedawe_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The CNN of FedAWE's CIFAR-10 experiments: two 3x3 convolutions with pooling, two hidden layers.

    >>> sum(p.numel() for p in fedawe_cnn((3, 32, 32), 10).parameters())
    551786
    """
    need_images("fedawe_cnn", shape, smallest=4)
    channels, height, wide = shape
    module = nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (wide // 4), 256),
        nn.ReLU(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )
    # As published: all layers but the last are initialised for ReLU.
    for layer in list(module)[:-1]:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module


def mlp(shape: tuple[int, ...], classes: int, *, hidden: Sequence[int] = (64,)) -> nn.Module:
    """A multi-layer perceptron on the flattened input.

    >>> mlp((1, 8, 8), 10, hidden=[32])
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=64, out_features=32, bias=True)
      (2): ReLU()
      (3): Linear(in_features=32, out_features=10, bias=True)
    )
    """
    if len(hidden) > MOST_LAYERS:
        raise ConfigError(f"hidden must name at most {MOST_LAYERS} layers, got {len(hidden)}")
    layers: list[nn.Module] = [nn.Flatten()]
    inner = math.prod(shape)
    for outer in hidden:
        need_positive("hidden", outer)
        layers += [nn.Linear(inner, outer), nn.ReLU()]
        inner = outer
    return nn.Sequential(*layers, nn.Linear(inner, classes))
