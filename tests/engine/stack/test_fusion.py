"""Changes of a module's graph: what they may change, and what they must leave alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from safari.engine.stack.fusion import pool_first


class Net(nn.Module):
    """A convolution, then whatever a test wants."""

    def __init__(self, pool: nn.Module):
        super().__init__()
        self.conv, self.relu, self.pool = nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), pool


class Module(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.relu(self.conv(x))) * 2


class Function(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.pool(F.relu(self.conv(x))) * 2


class ReadsTheRelu(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.conv(x))
        return self.pool(y).mean() + y


class ReadsTheInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.pool(F.relu(y, inplace=True)).mean() + y


class NoRelu(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.conv(x).tanh())


def order(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op not in ("placeholder", "output")]


def results(net: nn.Module, x: Tensor) -> list[Tensor]:
    out = net(x)
    wanted = [x, *net.parameters()]
    return [out, *torch.autograd.grad((out * torch.arange(out.numel()).view_as(out)).sum(), wanted)]


@pytest.mark.parametrize("kind", [Module, Function])
@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, 1)])
def test_pooling_goes_first_and_every_bit_stays(kind, pool):
    torch.manual_seed(0)
    net = kind(pool)
    # Ties, negative windows and what is no number at all.
    x = torch.randint(-1, 2, (4, 2, 6, 6)).float()
    x[0] = 0
    x[1, :, 2, 2] = torch.nan
    x.requires_grad_()
    graph = fx.Tracer().trace(net)
    pool_first(graph, dict(net.named_modules()))
    assert order(graph)[:3] in (["conv", "pool", "relu"], ["conv", "pool", "relu_1"])
    for found, expected in zip(results(fx.GraphModule(net, graph), x), results(net, x), strict=True):
        assert torch.equal(found.nan_to_num(7.5), expected.nan_to_num(7.5))


@pytest.mark.parametrize(
    "net",
    [
        ReadsTheRelu(nn.MaxPool2d(2)),
        ReadsTheInput(nn.MaxPool2d(2)),
        NoRelu(nn.MaxPool2d(2)),
        Module(nn.AvgPool2d(2)),
    ],
)
def test_other_graphs_stay_as_they_are(net):
    graph = fx.Tracer().trace(net)
    before = order(graph)
    pool_first(graph, dict(net.named_modules()))
    assert order(graph) == before
