"""The modules of `cases`: what users write, and what they should not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Fn(nn.Module):
    """Layers by name, and a forward that is given as a function of the module and the input."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **layers: nn.Module | Tensor):
        super().__init__()
        for name, layer in layers.items():
            if isinstance(layer, Tensor):
                self.register_buffer(name, layer, persistent=False)
            else:
                self.add_module(name, layer)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def on_vectors(run: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> Callable[[], nn.Module]:
    """A function of a head on vectors of 5, of other layers, and of the input."""
    return lambda: Fn(run, **layers, head=nn.Linear(5, 3))


def conv(*args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """A convolution of 2 to 4 channels and a head on what remains."""
    return lambda: nn.Sequential(
        nn.Conv2d(2, 4, *args, **kwargs), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


def between(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Layers on 4 channels, after a convolution and before a head."""
    return lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), *(layer() for layer in layers),
        nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


def hidden(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same on vectors of 6."""
    return lambda: nn.Sequential(nn.Linear(5, 6), *(layer() for layer in layers), nn.Linear(6, 3))


def on_pictures(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A function between a convolution and a head."""
    run = lambda m, x: m.head(F.adaptive_avg_pool2d(function(m.conv(x)), 2).flatten(1))
    return lambda: Fn(run, conv=nn.Conv2d(2, 4, 3, padding=1), head=nn.Linear(16, 3))


class Block(nn.Module):
    """A residual block; `where` says in which way the shortcut comes back."""

    def __init__(self, where: str):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.norm(self.b(x))
        if self.where == "add":
            y = torch.add(y, x)
        elif self.where == "iadd":
            y += x
        elif self.where == "into the shortcut":
            shortcut = x * 2
            kept = shortcut
            shortcut += y
            y = kept - 0.5 * y
        elif self.where == "method":
            y = y.add_(x)
        return self.head(F.relu(y, inplace=True).mean((2, 3)))


class Tied(nn.Module):
    """Two layers that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Own(nn.Module):
    """A parameter that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(5, 3), nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.scale)


class Standardised(nn.Module):
    """Pictures shifted by a constant, which is no part of the module's state."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4, 3)
        self.register_buffer("shift", torch.linspace(-1, 1, 4).view(1, 4, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x) - self.shift).mean((2, 3)))


class Counting(nn.Module):
    """The more samples it has seen, the larger its outputs."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(x.shape[0])
        return self.head(x) * (1 + 0.01 * self.seen)


class Stubborn(nn.Module):
    """Keeps its norm in eval mode, as people do who fine-tune."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.head = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def train(self, mode: bool = True) -> Stubborn:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.a(x)))


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.look = nn.Embedding(7, 4), nn.MultiheadAttention(4, 2, dropout, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        return self.head(self.look(x, x, x, need_weights=False)[0].mean(1))


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    for p in (*net[0].parameters(), net[1].weight):
        p.requires_grad_(False)
    return net


def zero_head(net: nn.Module) -> nn.Module:
    nn.init.zeros_(net[-1].weight)  # type: ignore[index]
    nn.init.zeros_(net[-1].bias)  # type: ignore[index]
    return net


def clipped() -> nn.Module:
    net = hidden(nn.Tanh)()
    net[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))  # type: ignore[index]
    return net


def hooked() -> nn.Module:
    net = hidden(nn.Tanh)()
    net[0].register_forward_hook(lambda layer, args, out: 2 * out)  # type: ignore[index]
    return net


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 3))


def centred(m: Any, x: Tensor) -> Tensor:
    return m.head(x - x.mean(0))


def mixing_gradient(x: Tensor) -> Tensor:
    """Zero, with a gradient that goes from every sample to all."""
    mean = x.mean(0, keepdim=True)
    return (mean - mean.detach()) * torch.arange(x.size(0)).view(-1, 1)
