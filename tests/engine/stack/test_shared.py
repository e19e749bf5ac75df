"""A pass that all clients share, with a gradient for each: against the module alone, once and twice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from safari.engine.stack.forward import by_layers
from safari.engine.stack.random_state import RandomState
from safari.engine.stack.shared import Plain, SharedConv, find_folded

CLIENTS, N = 3, 4
GEOMETRIES = {
    "3x3": Plain((3, 3), (1, 1), (1, 1), (1, 1), 1),
    "stride": Plain((3, 3), (2, 2), (1, 1), (1, 1), 1),
    "stride that leaves a rest": Plain((2, 2), (3, 3), (0, 0), (1, 1), 1),
    "dilation": Plain((3, 3), (1, 1), (2, 2), (2, 2), 1),
    "groups": Plain((3, 3), (1, 1), (1, 1), (1, 1), 2),
    "not square": Plain((1, 3), (1, 2), (0, 1), (1, 1), 1),
    "depthwise": Plain((3, 3), (1, 1), (1, 1), (1, 1), 4),
}


def alone(conv: Plain, x: Tensor, weight: Tensor) -> Tensor:
    """Each client's samples through weights of its own, one client after the other."""
    geometry = (None, conv.stride, conv.padding, conv.dilation, conv.groups)
    return torch.cat([F.conv2d(part, w, *geometry) for part, w in zip(x.chunk(CLIENTS), weight, strict=True)])


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_first_two_derivatives_are_those_of_clients_with_weights_of_their_own(name):
    conv = GEOMETRIES[name]
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(CLIENTS * N, 4, 8, 7, generator=draw, dtype=torch.float64)
    one = torch.randn(6 if conv.groups < 4 else 8, 4 // conv.groups, *conv.kernel, generator=draw).double()
    found = []
    for forward in (lambda a, b: SharedConv.apply(a, b, conv), lambda a, b: alone(conv, a, b)):
        inputs = x.clone().requires_grad_()
        weight = one.expand(CLIENTS, -1, -1, -1, -1).detach().requires_grad_()
        out = forward(inputs, weight)
        first = torch.autograd.grad(out.pow(3).sum(), (inputs, weight), create_graph=True)
        flow = torch.stack([(g * g.detach()).sum() for g in first]).sum()
        second = torch.autograd.grad(flow, (inputs, weight))
        found.append((out, *first, *second))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_a_batch_norm_is_folded_into_the_convolution_before_it():
    with torch.random.fork_rng([]):
        torch.manual_seed(2)
        net = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 4, 3, bias=False), nn.ReLU(), nn.BatchNorm2d(4),
            nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, affine=False), nn.Flatten(), nn.Linear(64, 3),
        ).double()  # fmt: skip
        for layer in net:
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_()
                layer.running_var.uniform_(0.2, 2.0)
        x = torch.randn(CLIENTS * N, 2, 6, 6, dtype=torch.float64)
    tensors = {
        name: tensor.detach().expand(CLIENTS, *tensor.shape)
        for name, tensor in net.state_dict().items()
        if tensor.is_floating_point()
    }
    found = by_layers(net, False)(tensors, x, RandomState([0] * CLIENTS, x.device))
    torch.testing.assert_close(found, net.eval()(x), rtol=1e-9, atol=1e-9)
    folded = find_folded(fx.Tracer().trace(net), dict(net.named_modules()), bfloat16=False)
    assert [str(node.target) for node in folded] == ["1", "7"], "the norm behind a ReLU stands alone"
