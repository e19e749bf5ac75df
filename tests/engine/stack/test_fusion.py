"""Changes of a module's graph: what they may change, and what they must leave alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from engine.stack.kernel_check import Plain
from safari.engine.stack.fusion import ReluFusion, find_fusions, pool_first
from safari.models import cnn, fedawe_cnn, pfl_cnn, resnet18


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


class Pooled(nn.Module):
    """A convolution, then the functions given, one after the other."""

    def __init__(self, *then: Callable[[Tensor], Tensor], conv: nn.Conv2d | None = None):
        super().__init__()
        self.conv = conv or nn.Conv2d(3, 16, 3, padding=1)
        self.then = then
        for i, step in enumerate(then):
            if isinstance(step, nn.Module):
                self.add_module(f"step{i}", step)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        for step in self.then:
            x = step(x)
        return x * 2


class ReadBetween(Pooled):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = F.relu(y)
        return F.max_pool2d(z, 2).sum() + (z if self.then else y)


def fusions(module: nn.Module, pooled: bool) -> list[ReluFusion]:
    found = find_fusions(fx.Tracer().trace(module), dict(module.named_modules()))
    return [f for f in found.values() if isinstance(f, ReluFusion) and f.pooled == pooled]


def pooled(module: nn.Module) -> list[ReluFusion]:
    return fusions(module, pooled=True)


def rectified(module: nn.Module) -> list[ReluFusion]:
    return fusions(module, pooled=False)


HALVINGS = [
    nn.MaxPool2d(2),
    nn.MaxPool2d((2, 2), stride=(2, 2)),
    lambda x: F.max_pool2d(x, 2),
    lambda x: F.max_pool2d(x, (2, 2), 2, 0, 1),
    lambda x: torch.max_pool2d(x, kernel_size=[2]),
]
RELUS = [nn.ReLU(), nn.ReLU(inplace=True), F.relu, torch.relu]


@pytest.mark.parametrize("pool", HALVINGS)
@pytest.mark.parametrize("relu", RELUS)
@pytest.mark.parametrize("bias", [True, False])
def test_convolution_relu_and_pooling_become_one_step_in_either_order(pool, relu, bias):
    conv = nn.Conv2d(3, 16, 3, padding=1, bias=bias)
    for then in ((relu, pool), (pool, relu)):
        module = Pooled(*then, conv=conv)
        (fusion,) = pooled(module)
        assert fusion.conv is conv
        assert fusion.conv_name == "conv"
        assert fusion.source.op == "placeholder"
        assert fusion.inner[0].target == "conv"
        assert len(fusion.inner) == 2


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d((2, 1)),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2),
        lambda x: F.max_pool2d(x, 2, 1),
        lambda x: F.max_pool2d(x, 2, ceil_mode=True),
        lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
        lambda x: F.avg_pool2d(x, 2),
        torch.tanh,
    ],
)
def test_other_pooling_is_left_alone(pool):
    assert not pooled(Pooled(nn.ReLU(), pool))
    assert not pooled(Pooled(pool, nn.ReLU()))


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 16, 3),
        nn.Conv2d(3, 16, 3, padding=1, stride=2),
        nn.Conv2d(3, 16, 3, padding=2, dilation=2),
        nn.Conv2d(3, 16, 1),
        nn.Conv2d(3, 16, 5, padding=2),
        nn.Conv2d(4, 16, 3, padding=1, groups=2),
        nn.Conv2d(3, 16, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(3, 24, 3, padding=1),
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Conv2d(64, 64, 3, padding=1),
    ],
)
def test_convolutions_without_a_kernel_for_pooling_are_left_alone(conv):
    assert not pooled(Pooled(nn.ReLU(), nn.MaxPool2d(2), conv=conv))


def test_what_another_layer_reads_is_not_fused():
    assert not pooled(ReadBetween())
    assert not pooled(ReadBetween(F.relu))
    assert not pooled(Pooled(F.relu, F.relu))
    assert not pooled(Pooled(nn.MaxPool2d(2)))


def test_which_layers_of_the_small_nets_are_fused_with_pooling():
    assert [f.conv_name for f in pooled(fedawe_cnn((3, 32, 32), 10))] == ["0", "3"]
    assert [f.conv_name for f in pooled(cnn((1, 8, 8), 10))] == ["2"]
    # Its convolutions have no padding.
    assert not pooled(pfl_cnn((3, 32, 32), 10))


@pytest.mark.parametrize("relu", RELUS)
@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 16, 3, padding=1),
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.Conv2d(64, 128, 1),
    ],
)
def test_convolution_and_relu_become_one_step(conv, relu):
    (fusion,) = rectified(Pooled(relu, conv=conv))
    assert fusion.conv is conv
    assert fusion.source.op == "placeholder"
    assert [node.target for node in fusion.inner] == ["conv"]


def test_convolutions_without_a_kernel_or_without_a_relu_of_their_own_are_left_alone():
    assert not rectified(Pooled(torch.tanh))
    assert not rectified(Pooled(nn.BatchNorm2d(16), nn.ReLU()))
    assert not rectified(Pooled(nn.ReLU(), conv=nn.Conv2d(3, 24, 3, padding=1)))
    assert not rectified(Pooled(nn.ReLU(), conv=nn.Conv2d(3, 16, 3)))
    # Somebody reads what the ReLU reads: it is not the convolution's alone.
    assert not rectified(ReadBetween())
    # A convolution is part of one step.
    assert not rectified(Pooled(nn.ReLU(), nn.MaxPool2d(2)))


def test_every_convolution_of_the_small_nets_is_part_of_a_step():
    assert [f.conv_name for f in rectified(cnn((3, 32, 32), 10))] == ["0"]
    assert [f.conv_name for f in pooled(cnn((3, 32, 32), 10))] == ["2"]
    assert not rectified(fedawe_cnn((3, 32, 32), 10))


def test_one_relu_behind_several_convolutions_ends_each_of_them():
    found = rectified(Plain())
    assert [f.conv_name for f in found] == ["layers.0", "layers.1", "layers.2"]
    assert len({node for f in found for node in f.inner}) == 3
