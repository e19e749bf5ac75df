"""Models that come with the package. A model is a function of the input's shape and the number of classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from safari.errors import ConfigError


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (option A: subsample, pad with zeros)."""

    def __init__(self, inner: int, outer: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.stride = stride
        self.extra = outer - inner

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.stride != 1 or self.extra:
            before = self.extra // 2
            shortcut = F.pad(
                x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.extra - before)
            )
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + shortcut)


class ResNet(nn.Module):
    """The CIFAR ResNet of He et al. (2016): 6n+2 layers in three stages, option-A shortcuts."""

    def __init__(self, channels: int, classes: int, blocks: int, width: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        stages = []
        inner = width
        for stage in range(3):
            outer = width * 2**stage
            for block in range(blocks):
                stages.append(_Block(inner, outer, 2 if stage and not block else 1))
                inner = outer
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(inner, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of pictures."""
        x = F.relu(self.bn(self.conv(x)))
        x = self.blocks(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def resnet20(shape: tuple[int, ...], classes: int, *, width: int = 16) -> nn.Module:
    """ResNet-20 for CIFAR, option-A shortcuts: 269,722 parameters for 3x32x32 inputs and 10 classes.

    >>> sum(p.numel() for p in resnet20((3, 32, 32), 10).parameters())
    269722
    """
    _need_images("resnet20", shape, smallest=4)
    _need_positive("width", width)
    return ResNet(shape[0], classes, blocks=3, width=width)


def cnn(shape: tuple[int, ...], classes: int, *, width: int = 16) -> nn.Module:
    """A small CNN for small pictures: two 3x3 convolutions, pooling, one hidden layer; for 8x8 digits.

    >>> sum(p.numel() for p in cnn((1, 8, 8), 10).parameters())
    38282
    """
    _need_images("cnn", shape, smallest=4)
    _need_positive("width", width)
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
    """The small CNN of pfl-research's CIFAR-10 benchmark: two 3x3 convolutions, pooling, dropout, one hidden
    layer; for 3x32x32 pictures.

    >>> sum(p.numel() for p in pfl_cnn((3, 32, 32), 10).parameters())
    1626442
    """
    _need_images("pfl_cnn", shape, smallest=6)
    _need_positive("hidden", hidden)
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
    _need_images("fedawe_cnn", shape, smallest=4)
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
    layers: list[nn.Module] = [nn.Flatten()]
    inner = math.prod(shape)
    for outer in hidden:
        _need_positive("hidden", outer)
        layers += [nn.Linear(inner, outer), nn.ReLU()]
        inner = outer
    return nn.Sequential(*layers, nn.Linear(inner, classes))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn": cnn,
    "fedawe_cnn": fedawe_cnn,
    "mlp": mlp,
    "pfl_cnn": pfl_cnn,
    "resnet20": resnet20,
}


def _need_images(name: str, shape: tuple[int, ...], smallest: int) -> None:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        size = f"{smallest}x{smallest}"
        raise ConfigError(f"{name} needs pictures (channels, height, width) of at least {size}; got {shape}")


def _need_positive(field: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{field} must be at least 1, got {value}")
