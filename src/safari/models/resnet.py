"""Residual networks for small pictures (He et al., 2016)."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from safari.errors import ConfigError
from safari.models.checks import need_images, need_positive


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
    need_images("resnet20", shape, smallest=4)
    need_positive("width", width)
    return ResNet(shape[0], classes, blocks=3, width=width)


class _WideBlock(nn.Module):
    """Two 3x3 convolutions; where the shape changes, a 1x1 convolution in the shortcut (option B)."""

    def __init__(self, inner: int, outer: int, stride: int, norm: str, groups: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = _norm(norm, outer, groups)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = _norm(norm, outer, groups)
        self.shortcut = nn.Sequential()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), _norm(norm, outer, groups)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 as it is used on CIFAR: a 3x3 stem without pooling, four stages of two blocks."""

    def __init__(self, channels: int, classes: int, width: int, norm: str, groups: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.norm = _norm(norm, width, groups)
        stages = []
        inner = width
        for stage in range(4):
            outer = width * 2**stage
            for block in range(2):
                stride = 2 if stage and not block else 1
                stages.append(_WideBlock(inner, outer, stride, norm, groups))
                inner = outer
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(inner, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of pictures."""
        x = F.relu(self.norm(self.conv(x)))
        x = self.blocks(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def resnet18(
    shape: tuple[int, ...],
    classes: int,
    *,
    width: int = 64,
    norm: Literal["batch", "group"] = "batch",
    groups: int = 2,
) -> nn.Module:
    """ResNet-18 in the form for CIFAR: 11,173,962 parameters for 3x32x32 inputs and 10 classes.

    `norm = "group"` replaces batch norm by group norm with `groups` groups a layer, as is usual in federated
    learning, where the statistics of batches differ between clients (Hsieh et al., 2020; two groups: Reddi et
    al., 2021).

    >>> sum(p.numel() for p in resnet18((3, 32, 32), 10).parameters())
    11173962
    """
    need_images("resnet18", shape, smallest=4)
    need_positive("width", width)
    need_positive("groups", groups)
    if norm == "group" and width % groups:
        raise ConfigError(f"groups must divide width ({width}), got {groups}")
    return ResNet18(shape[0], classes, width, norm, groups)


def _norm(kind: str, channels: int, groups: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(groups, channels)
