"""Parts of a user's own, as the source of a file: data, a partition, modules of every kind, a pruner."""

from __future__ import annotations

PICTURES = """
import torch
def pictures():
    draw = torch.Generator().manual_seed(3)
    y = torch.arange(240) % 4
    x = torch.randn(240, 3, 12, 12, generator=draw)
    x += y.view(-1, 1, 1, 1) * torch.randn(1, 3, 12, 12, generator=draw)
    return (x[:160], y[:160]), (x[160:], y[160:])
"""

# Nothing is kept of the first filter: its output is constant, and its running variance falls to 0.
NORMED = (
    PICTURES
    + """
from torch import nn
def normed(shape, classes):
    first = nn.Conv2d(shape[0], 8, 3, bias=False)
    first.weight.data[0] *= 1e-6
    return nn.Sequential(
        first, nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, classes)
    )
"""
)

PLUGINS = (
    PICTURES
    + """
import numpy as np, torch
from torch import nn
import torch.nn.functional as F
from safari.pruning import Pruner
from safari.pruning.scores import snip

def twenty_each(labels, clients, rng):
    return [np.arange(20 * client, 20 * client + 20) for client in range(clients)]

def net(*layers):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), *layers, nn.Linear(12, 10))

def dropout(shape, classes):
    return net(nn.ReLU(), nn.Dropout(0.4))

def by_vmap(shape, classes):
    return net(nn.PReLU())

def by_loop(shape, classes):
    return net(nn.PReLU(), nn.Dropout(0.4))

class Sometimes(nn.Module):
    '''Uses a layer in some steps alone: Adam counts that layer's steps apart.'''
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(64, 12), nn.Linear(12, 12), nn.Linear(12, 10)
    def forward(self, x):
        x = torch.tanh(self.a(x.flatten(1)))
        return self.head(self.b(x) if x.mean() > 0 else x)

def sometimes(shape, classes):
    return Sometimes()

def frozen(shape, classes):
    module = net(nn.ReLU())
    module[1].requires_grad_(False)
    return module

class Restless(nn.Module):
    '''Writes into its inputs, and counts.'''
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.head(x.flatten(1).mul_(2).sub_(1)) * (1 + 0.1 * self.seen)

def restless(shape, classes):
    return Restless()

gently = Pruner(snip, iterations=4)
"""
)
