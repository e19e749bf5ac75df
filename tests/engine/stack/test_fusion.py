"""Changes of a module's graph: what they may change, and what they must leave alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from safari.engine.stack.fusion import find_fusions, pool_first
from safari.models import resnet18


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


def test_every_convolution_of_a_resnet18_becomes_a_step_and_each_sum_belongs_to_one():
    """The sum of a block may end the block's own convolution or its shortcut's: to both it would be made twice."""
    module = resnet18((3, 8, 8), 10).train()
    graph = fx.Tracer().trace(module)
    found = find_fusions(graph, dict(module.named_modules()))
    convolutions = [name for name, layer in module.named_modules() if type(layer) is nn.Conv2d]
    assert sorted(f.conv_name for f in found.values()) == sorted(convolutions)
    inner = [node for f in found.values() for node in f.inner]
    assert len(inner) == len(set(inner))
    shortcuts = [f for f in found.values() if "shortcut" in f.conv_name]
    assert len(shortcuts) == 3
    assert not any(f.relu or f.residual for f in shortcuts)
    sums = [f for f in found.values() if f.residual is not None]
    assert [f.conv_name for f in sums] == [f"blocks.{i}.conv2" for i in range(8)]
    assert all(f.relu for f in sums)
