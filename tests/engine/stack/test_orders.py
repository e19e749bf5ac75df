"""The order in which activations and their gradients lie in memory: it decides how fast pooling is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from safari.engine.stack.ops import Value, linear


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("clients", [1, 2])
def test_pictures_lie_by_pixel_whatever_their_number_of_channels(channels, clients):
    x = torch.randn(clients * 4, channels, 6, 6)
    found = Value(x, clients).channel()
    together = clients * channels
    assert found.stride() == (36 * together, 1, 6 * together, together)
    for client in range(clients):
        own = found[:, client * channels : (client + 1) * channels]
        assert torch.equal(own, x[client * 4 : (client + 1) * 4])
    # torch goes by the strides.
    out = F.conv2d(found, torch.randn(2, together, 3, 3))
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_a_gradient_comes_back_in_the_order_of_what_it_belongs_to():
    x = torch.randn(4, 6, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(2 * 4, 3 * 8 * 8)
    (Value(x, clients=2, by_channel=True).batch().flatten(1) * weight).sum().backward()
    assert x.grad.is_contiguous(memory_format=torch.channels_last)
    expected = weight.view(2, 4, 3, 8, 8).transpose(0, 1).reshape(4, 6, 8, 8)
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("bias", [True, False])
def test_the_gradient_of_a_linear_layer_lies_as_its_weight_does(bias):
    layer, draw = nn.Linear(5, 3, bias=bias), torch.Generator().manual_seed(0)
    shapes = {"weight": (2, 3, 5), "bias": (2, 3)} if bias else {"weight": (2, 3, 5)}
    p = {name: torch.randn(shape, generator=draw, requires_grad=True) for name, shape in shapes.items()}
    x = torch.randn(2 * 4, 5, generator=draw, requires_grad=True)
    out = linear(layer, "", Value(x, clients=2), p).tensor
    plain = torch.cat(
        [F.linear(x[4 * i : 4 * i + 4], *(tensor[i] for tensor in p.values())) for i in range(2)]
    )
    torch.testing.assert_close(out, plain)
    probe = torch.randn(out.shape, generator=draw)
    wanted = [x, *p.values()]
    found, expected = (torch.autograd.grad((o.tanh() * probe).sum(), wanted) for o in (out, plain))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.is_contiguous()


def test_the_gradient_of_the_gradient_goes_through():
    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    batch = Value(x.tanh(), clients=2, by_channel=True).batch()
    (first,) = torch.autograd.grad(batch.square().sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(first.sum(), x)
    plain = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(plain.tanh().square().sum(), plain, create_graph=True)
    (expected,) = torch.autograd.grad(first.sum(), plain)
    torch.testing.assert_close(found, expected)
