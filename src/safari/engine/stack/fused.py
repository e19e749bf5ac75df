"""Differentiable steps over many clients, each a few kernels (CUDA): convolution, batch norm, shortcut and ReLU;
convolution and ReLU; and convolution, ReLU and max pooling."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from safari.engine.stack import kernels as k
from safari.engine.stack import pool_kernels as pk
from safari.engine.stack.served import padded, pool_padded
from safari.training import Scaled


class ConvNorm(torch.autograd.Function):
    """`relu(batch_norm(conv(x)) + residual)` with each client's own weights and statistics.

    x and residual are `[clients · n, h, w, channels]` in bfloat16; the weight `[clients, out, in, side, side]`, 3x3
    or 1x1, and the norm's parameters `[clients, out]` in float32. The running statistics are updated in place.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, residual: Tensor | None,
        running_mean: Tensor, running_var: Tensor, stride: int, relu: bool, momentum: float, eps: float,
    ) -> Tensor:  # fmt: skip
        """The step; what the backward pass needs is saved."""
        clients, side = weight.shape[0], weight.shape[-1]
        missing = padded(x.shape[-1]) - x.shape[-1]
        if missing:
            x = torch.nn.functional.pad(x, (0, missing))
        x = x.contiguous()
        w, turned = k.weights_for(weight, x.shape[-1], x.dtype)
        y, partial = k.conv(x, w, weight.shape[1], clients, stride, stats=True, side=side)
        channels, blocks = y.shape[-1], partial.shape[1]
        size = y.numel() // clients
        mean, rstd, scale, shift = torch.empty((4, clients, channels), device=x.device).unbind()
        k._norm_statistics_kernel[clients,](partial, gamma, beta, mean, rstd, scale, shift,
            running_mean, running_var, blocks, size // channels, momentum, eps,
            C=channels, ROWS=4096 // channels,
        )  # fmt: skip
        out = torch.empty_like(y)
        residual = None if residual is None else residual.contiguous()
        k._norm_apply_kernel[triton.cdiv(size, k.BLOCK), clients](y, scale, shift,
            y if residual is None else residual, out, size,
            C=channels, RESIDUAL=residual is not None, RELU=relu, BLOCK=k.BLOCK,
        )  # fmt: skip
        ctx.save_for_backward(x, turned, y, out, mean, rstd, scale, shift)
        ctx.facts = (clients, stride, relu, residual is not None, weight.shape[2], side)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients with respect to x, weight, gamma, beta and residual."""
        x, turned, y, out, mean, rstd, scale, shift = ctx.saved_tensors
        clients, stride, relu, has_residual, inner, side = ctx.facts
        grad = grad.contiguous()
        channels = y.shape[-1]
        size = y.numel() // clients
        rows = size // channels
        rows_each = 8192 // channels
        blocks = triton.cdiv(rows, rows_each)
        common = {"C": channels, "RESIDUAL": has_residual, "RELU": relu}
        partial = torch.empty((clients, blocks, 2, channels), device=x.device)
        k._norm_gradient_sums_kernel[blocks, clients](grad, y, out, mean, rstd, scale, shift, partial,
            rows, blocks, ROWS=rows_each, **common,
        )  # fmt: skip
        sums = torch.empty((2, clients, channels), device=x.device)
        k._norm_gradient_total_kernel[clients,](partial, sums, blocks, C=channels, ROWS=4096 // channels)
        dy = torch.empty_like(y)
        dresidual = torch.empty_like(y) if has_residual else None
        k._norm_gradient_kernel[triton.cdiv(size, k.BLOCK), clients](grad, y, out, mean, rstd, scale,
            shift, sums, dy, dy if dresidual is None else dresidual, size, rows, clients,
            BLOCK=k.BLOCK, **common,
        )  # fmt: skip
        dx = None
        if ctx.needs_input_grad[0]:
            h, wd, cin = x.shape[1:]
            dx = k.conv_input_gradient(dy, turned, cin, clients, stride, h, wd, side)[..., :inner]
        dw = k.conv_weight_gradient(x, dy, inner, clients, stride, side=side)
        return dx, dw, sums[1], sums[0], dresidual, *[None] * 6


class ConvRelu(torch.autograd.Function):
    """`relu(conv(x) + bias)` with each client's own weights, for the convolutions of `ConvNorm`.

    x is `[clients · n, h, w, channels]` of any strides and floating type; the weight `[clients, out, in, side, side]`
    and the bias `[clients, out]`, if any, in float32. The result is by pixel, in `dtype`; it is rounded to that before
    the bias is added and again after it, as torch does under autocast.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, dtype: torch.dtype
    ) -> Tensor:
        """The step; what the backward pass needs is saved."""
        clients, cout, inner, side, _ = weight.shape
        x = pk.packed(x, padded(inner), dtype)
        w, turned = k.weights_for(weight, x.shape[-1], dtype)
        y, _ = k.conv(x, w, cout, clients, stride, stats=False, side=side)
        # A norm with a scale of 1; in place, because the gradient needs the result alone.
        one = torch.ones((clients, cout), device=x.device)
        shift = torch.zeros_like(one) if bias is None else bias.contiguous()
        size = y.numel() // clients
        k._norm_apply_kernel[triton.cdiv(size, k.BLOCK), clients](y, one, shift, y, y, size,
            C=cout, RESIDUAL=False, RELU=True, BLOCK=k.BLOCK,
        )  # fmt: skip
        ctx.save_for_backward(x, turned, y)
        ctx.facts = (clients, stride, inner, side)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients with respect to x, weight and bias."""
        x, turned, out = ctx.saved_tensors
        clients, stride, inner, side = ctx.facts
        dy = torch.ops.aten.threshold_backward(grad.contiguous(), out, 0)
        dx = None
        if ctx.needs_input_grad[0]:
            h, wd, cin = x.shape[1:]
            dx = k.conv_input_gradient(dy, turned, cin, clients, stride, h, wd, side)[..., :inner]
        dw = k.conv_weight_gradient(x, dy, inner, clients, stride, side=side)
        db = (
            dy.view(clients, -1, dy.shape[-1]).sum(1, dtype=torch.float32)
            if ctx.needs_input_grad[2]
            else None
        )
        return dx, dw, db, None, None


class ConvPool(torch.autograd.Function):
    """`max_pool2d(relu(conv(x) + bias), 2)` with each client's own weights, for 3x3 convolutions with padding 1.

    x is `[clients · n, h, w, channels]` of any strides and floating type; the weight `[clients, out, in, 3, 3]` and
    the bias `[clients, out]`, if any, in float32. The result is by pixel, in `dtype`; in bfloat16 it is what torch
    gives, and the gradient goes where torch sends it: to the first of the largest pixels, and nowhere if that is 0.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The step; what the backward pass needs is saved."""
        clients, cout, inner = weight.shape[:3]
        x = pk.packed(x, pool_padded(inner), dtype)
        w = pk.weights_for(weight, x.shape[-1], dtype)
        out, winner = pk.conv_pool(x, w, bias, cout, clients)
        ctx.save_for_backward(x, weight, winner)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients with respect to x, weight and bias."""
        x, weight, winner = ctx.saved_tensors
        clients, _, inner = weight.shape[:3]
        grad, dx = grad.contiguous(), None
        if ctx.needs_input_grad[0]:
            _, h, wd, cin = pk.unframed(x)
            turned = pk.weights_for(weight, cin, x.dtype, turned=True)
            dx = pk.input_gradient(grad, winner, turned, cin, clients, h, wd)[..., :inner]
        dw, db = pk.weight_gradient(x, grad, winner, inner, clients)
        return dx, dw, db if ctx.needs_input_grad[2] else None, None


def adam_(
    parameters: Tensor, gradient: Tensor, first: Tensor, second: Tensor, mask: Tensor, step: int, lr: float,
    beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    """Adam with a masked gradient, in place, in one pass over memory."""
    size = parameters.numel()
    k._adam_kernel[triton.cdiv(size, k.BLOCK),](parameters, gradient, first, second, mask, size,
        lr / (1 - beta1**step), (1 - beta2**step) ** 0.5, eps, 1 - beta1, beta2, 1 - beta2, BLOCK=k.BLOCK,
    )  # fmt: skip


def sgd_(parameters: Tensor, gradient: Tensor, mask: Tensor, rate: float | Tensor) -> None:
    """`parameters -= rate · gradient` where the mask is true, in place, in one pass over memory."""
    size = parameters.numel()
    unit = 4 if size % 4 == 0 else 1
    k._sgd_kernel[triton.cdiv(size, k.BLOCK),](parameters, gradient.contiguous(), mask, rate, size // unit,
        UNIT=unit, TENSOR=isinstance(rate, Tensor), BLOCK=k.BLOCK,
    )  # fmt: skip


# A gradient of this many numbers is worth a kernel of its own: copying it would take longer.
LARGE = 1 << 20


def sgd_in_parts_(parameters: Tensor, parts: Sequence[Tensor], mask: Tensor, rate: float | Tensor) -> None:
    """`sgd_` with the gradient in parts, one after the other; only small ones are copied together."""
    start = 0
    for large, group in groupby(parts, lambda part: part.numel() >= LARGE):
        found = list(group)
        for gradient in found if large else [torch.cat(found)]:
            end = start + gradient.numel()
            sgd_(parameters[start:end], gradient, mask[start:end], rate)
            start = end


def scaled_sgd_in_parts_(
    parameters: Tensor,
    parts: Sequence[Tensor],
    mask: Tensor,
    rate: float | Tensor,
    scaled: Scaled,
    clients: int,
) -> None:
    """`parameters -= rate · scaled.of(gradient)` where the mask is true, in place, in one pass over memory.

    A part of the gradient holds one tensor of the model for all clients.
    """
    start = 0
    for gradient in parts:
        each, end = gradient.numel() // clients, start + gradient.numel()
        first = start // clients
        k._scaled_sgd_kernel[triton.cdiv(each, k.BLOCK), clients](
            parameters[start:end], gradient.contiguous(), mask[start:end], scaled.shift[first : first + each],
            scaled.scale[first : first + each], rate, scaled.weight, scaled.limit, each,
            TENSOR=isinstance(rate, Tensor), BLOCK=k.BLOCK,
        )  # fmt: skip
        start = end


def crops(data: Tensor, index: Tensor, shift: Tensor, flip: Tensor, pad: int) -> Tensor:
    """`crop_and_flip(data[index], shift, flip, pad)`, to the last bit, in one pass over memory; data are contiguous."""
    _, channels, height, width = data.shape
    out = data.new_empty((len(index), channels, height, width))
    k._crops_kernel[len(index), triton.cdiv(channels * height * width, k.BLOCK)](data, index.contiguous(),
        shift.contiguous(), flip.contiguous(), out, C=channels, H=height, W=width, PAD=pad, BLOCK=k.BLOCK,
    )  # fmt: skip
    return out
