"""One pass for many clients with the *same* weights, and each client's own gradient.

Pruners that look at data judge one global model on every client's samples. So all samples go through one
ordinary net as one large batch; only the gradients with respect to the weights are kept apart, client by
client. Batch norm is a fixed factor and shift in eval mode, and is folded into the convolution before it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_input

from safari.engine.stack.ops import LAYERS, Stacked, Tensors, Value, batch_norm

# Pixels that one matrix product of a weight's gradient sums over: long enough to be worth a product, short
# enough that there are as many products as a device has cores.
_PIXELS = 1024


class Convolution(Protocol):
    """A convolution and its two gradients, in `dtype`: `x` as `[clients · n, channels, h, w]`, `weight` as
    `[clients, out, in, kh, kw]`; `same` says that all clients have the same weights."""

    dtype: ClassVar[torch.dtype]

    def forward(self, x: Tensor, weight: Tensor, same: bool) -> Tensor:
        """The convolution."""

    def input_gradient(self, dy: Tensor, weight: Tensor, shape: torch.Size, same: bool) -> Tensor:
        """Gradient with respect to x, which has this shape."""

    def weight_gradient(self, x: Tensor, dy: Tensor, clients: int) -> Tensor:
        """Gradient with respect to each client's weights, summed over that client's samples."""


@dataclass(frozen=True)
class Plain:
    """Any zero-padded convolution, in torch's own operations."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    dtype: ClassVar[torch.dtype] = torch.float32

    def forward(self, x: Tensor, weight: Tensor, same: bool) -> Tensor:
        """One convolution over all samples, or one matrix product a client."""
        if same:
            return F.conv2d(x, weight[0], None, self.stride, self.padding, self.dilation, self.groups)
        high, wide = self._size(x)
        columns = self._columns(x, len(weight))
        out = columns @ self._rows(weight).transpose(2, 3)
        return out.transpose(1, 2).reshape(len(x), high, wide, -1).permute(0, 3, 1, 2)

    def input_gradient(self, dy: Tensor, weight: Tensor, shape: torch.Size, same: bool) -> Tensor:
        """One transposed convolution over all samples, or one matrix product a client, summed tap by tap."""
        if same:
            geometry = (self.stride, self.padding, self.dilation, self.groups)
            dx: Tensor = conv2d_input(shape, weight[0], dy, *geometry)
            return dx
        samples, channels, high, wide = shape
        columns = self._by_pixel(dy, len(weight)) @ self._rows(weight)
        taps = columns.transpose(1, 2).reshape(samples, *dy.shape[2:], self.groups, *self.kernel, -1)
        taps = taps.permute(4, 5, 0, 1, 2, 3, 6).flatten(5)
        up, left = self.padding
        out = dy.new_zeros(samples, high + 2 * up, wide + 2 * left, channels)
        for i, j in itertools.product(range(self.kernel[0]), range(self.kernel[1])):
            out[:, self._read(0, i, dy.shape[2]), self._read(1, j, dy.shape[3])] += taps[i, j]
        return out[:, up : up + high, left : left + wide].permute(0, 3, 1, 2)

    def weight_gradient(self, x: Tensor, dy: Tensor, clients: int) -> Tensor:
        """Matrix products of windows with the gradients of their pixels."""
        columns, d = self._columns(x, clients), self._by_pixel(dy, clients)
        pixels = dy.shape[2] * dy.shape[3]
        together = math.gcd(len(x) // clients, max(1, _PIXELS // pixels)) * pixels
        parts = d.unflatten(2, (-1, together)).mT @ columns.unflatten(2, (-1, together))
        found: Tensor = parts.sum(2).unflatten(3, (*self.kernel, -1))
        return found.permute(0, 1, 2, 5, 3, 4).flatten(1, 2)

    def _read(self, axis: int, tap: int, count: int) -> slice:
        """Lines, or columns, of the padded input that this tap of the kernel reads."""
        first, step = tap * self.dilation[axis], self.stride[axis]
        return slice(first, first + (count - 1) * step + 1, step)

    def _size(self, x: Tensor) -> tuple[int, int]:
        high, wide = (
            (x.shape[2 + i] + 2 * self.padding[i] - self.dilation[i] * (self.kernel[i] - 1) - 1)
            // self.stride[i]
            + 1
            for i in (0, 1)
        )
        return high, wide

    def _columns(self, x: Tensor, clients: int) -> Tensor:
        """Window of each output pixel (im2col): `[clients, groups, n · pixels, kh · kw · in]`."""
        high, wide = self._size(x)
        (up, left), (down, right) = self.padding, self.dilation
        padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, left, left, up, up)).contiguous()
        each, line, pixel, _ = padded.stride()
        windows = padded.as_strided(
            (len(x), high, wide, *self.kernel, x.shape[1]),
            (each, line * self.stride[0], pixel * self.stride[1], line * down, pixel * right, 1),
        )
        grouped: Tensor = windows.unflatten(5, (self.groups, -1)).unflatten(0, (clients, -1))
        return grouped.permute(0, 6, 1, 2, 3, 4, 5, 7).flatten(5, 7).flatten(2, 4)

    def _by_pixel(self, y: Tensor, clients: int) -> Tensor:
        """`[clients, groups, n · pixels, out]`."""
        pixels: Tensor = y.permute(0, 2, 3, 1).unflatten(3, (self.groups, -1))
        grouped: Tensor = pixels.unflatten(0, (clients, -1))
        return grouped.permute(0, 4, 1, 2, 3, 5).flatten(2, 4)

    def _rows(self, weight: Tensor) -> Tensor:
        """`[clients, groups, out, kh · kw · in]`."""
        grouped: Tensor = weight.unflatten(1, (self.groups, -1))
        return grouped.permute(0, 1, 2, 4, 5, 3).flatten(3)


class SharedConv(torch.autograd.Function):
    """`conv.forward` with the same weights for all clients, differentiable twice.

    x is `[clients · n, in, h, w]`; of the weights `[clients, out, in, kh, kw]` only the first is read, and
    each gets its own gradient, as if a client had weights of its own that happen to be equal.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, conv: Convolution) -> Tensor:
        """The convolution."""
        ctx.save_for_backward(x, weight)
        ctx.conv = conv
        return conv.forward(x, weight, same=True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None]:
        """Gradients with respect to x and to each client's weights."""
        x, weight = ctx.saved_tensors
        dx, dw = _Gradients.apply(dy, x, weight, ctx.conv, ctx.needs_input_grad[0])  # type: ignore[no-untyped-call]
        return dx, dw, None


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dy: Tensor, x: Tensor, weight: Tensor, conv: Convolution, inner: bool
    ) -> tuple[Tensor | None, Tensor]:
        ctx.save_for_backward(dy, x, weight)
        ctx.conv = conv
        ctx.set_materialize_grads(False)
        dx = conv.input_gradient(dy, weight, x.shape, same=True) if inner else None
        return dx, conv.weight_gradient(x, dy, len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ddx: Tensor | None, ddw: Tensor | None) -> tuple[Tensor | None, ...]:
        # dx is linear in dy and in the weights, dw is linear in dy and in x.
        (dy, x, weight), conv = ctx.saved_tensors, ctx.conv
        for_dy = for_x = for_weight = None
        if ddw is not None:
            for_dy = conv.forward(x, ddw, same=False)
            if ctx.needs_input_grad[1]:
                for_x = conv.input_gradient(dy, ddw, x.shape, same=False)
        if ddx is not None:
            through = conv.forward(ddx, weight, same=True)
            for_dy = through if for_dy is None else for_dy + through
            for_weight = conv.weight_gradient(ddx, dy, len(weight))
        return for_dy, for_x, for_weight, None, None


@dataclass(frozen=True)
class Folded:
    """A convolution and the batch norm behind it as one step."""

    conv: nn.Conv2d
    norm: nn.BatchNorm2d
    conv_name: str
    norm_name: str
    source: fx.Node
    inner: tuple[fx.Node, ...]
    bfloat16: bool

    def run(self, values: Mapping[fx.Node, Value], tensors: Tensors) -> Value:
        """The step for all clients."""
        factor, shift = _affine(self.norm, f"{self.norm_name}.", tensors)
        weight = tensors[f"{self.conv_name}.weight"] * factor.view(-1, 1, 1, 1)
        if self.conv.bias is not None:
            shift = shift + tensors[f"{self.conv_name}.bias"][0] * factor
        return _convolve(self.conv, values[self.source], weight, shift, self.bfloat16)


def find_folded(graph: fx.Graph, modules: Mapping[str, nn.Module], bfloat16: bool) -> dict[fx.Node, Folded]:
    """Convolutions followed by a batch norm alone, under the norm's node; the graph is one in eval mode."""
    found = {}
    for node in graph.nodes:
        norm = modules.get(str(node.target)) if node.op == "call_module" else None
        if type(norm) is not nn.BatchNorm2d or not _fixed(norm):
            continue
        before = node.args[0]
        conv = modules.get(str(before.target)) if before.op == "call_module" else None
        if type(conv) is nn.Conv2d and len(before.users) == 1:
            found[node] = Folded(
                conv, norm, str(before.target), str(node.target), before.args[0], (before,), bfloat16
            )
    return found


def shared_layers(bfloat16: bool) -> dict[type[nn.Module], Stacked]:
    """Layers over clients with the same weights; those that are not here do not care."""

    def conv2d(layer: nn.Conv2d, name: str, x: Value, p: Tensors) -> Value:
        bias = None if layer.bias is None else p[f"{name}bias"][0]
        return _convolve(layer, x, p[f"{name}weight"], bias, bfloat16)

    def norm(layer: nn.modules.batchnorm._BatchNorm, name: str, x: Value, p: Tensors) -> Value:
        if not _fixed(layer):
            return batch_norm(layer, name, x, p)
        factor, shift = _affine(layer, name, p)
        inputs = x.batch()
        shape = (1, -1, *[1] * (inputs.ndim - 2))
        return Value(torch.addcmul(shift.view(shape), inputs, factor.view(shape)), x.clients)

    others = {**LAYERS, nn.BatchNorm1d: norm, nn.BatchNorm2d: norm}
    if bfloat16:
        others = {kind: _in_float32(stacked) for kind, stacked in others.items()}
    return {**others, nn.Conv2d: conv2d}


def _in_float32(stacked: Stacked) -> Stacked:
    """Only convolutions are worth fewer bits here; tokens stay what they are."""

    def layer(layer: nn.Module, name: str, x: Value, p: Tensors) -> Value:
        return stacked(layer, name, x.like(x.tensor.float()) if x.tensor.is_floating_point() else x, p)

    return layer


def _convolve(layer: nn.Conv2d, x: Value, weight: Tensor, bias: Tensor | None, bfloat16: bool) -> Value:
    inputs, conv = x.batch(), _geometry(layer)
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        inputs = F.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)
    kernels: Convolution | None = None
    if bfloat16:
        from safari.engine.stack.shared_kernels import kernels_for

        kernels = kernels_for(conv, layer.in_channels, layer.out_channels)
        inputs = inputs.to((kernels or conv).dtype)
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    out = SharedConv.apply(inputs, weight, kernels or conv)  # type: ignore[no-untyped-call]
    return Value(out if bias is None else out + bias.to(out.dtype).view(-1, 1, 1), x.clients)


def _geometry(layer: nn.Conv2d) -> Plain:
    pads = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return Plain(
        (layer.kernel_size[0], layer.kernel_size[1]),
        (layer.stride[0], layer.stride[1]),
        (int(layer.padding[0]), int(layer.padding[1])) if pads else (0, 0),
        (layer.dilation[0], layer.dilation[1]),
        layer.groups,
    )


def _fixed(norm: nn.modules.batchnorm._BatchNorm) -> bool:
    """Does the norm use its running statistics, and not the batch?"""
    return not norm.training and norm.running_mean is not None


def _affine(norm: nn.modules.batchnorm._BatchNorm, name: str, p: Tensors) -> tuple[Tensor, Tensor]:
    factor = torch.rsqrt(p[f"{name}running_var"][0] + norm.eps)
    if norm.affine:
        factor = factor * p[f"{name}weight"][0]
    shift = -p[f"{name}running_mean"][0] * factor
    return factor, shift + p[f"{name}bias"][0] if norm.affine else shift
