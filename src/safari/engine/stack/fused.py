"""Convolution, batch norm, shortcut and ReLU as one differentiable step over many clients (CUDA)."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from safari.engine.stack import kernels as k
from safari.engine.stack.served import padded


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


def adam_(
    parameters: Tensor, gradient: Tensor, first: Tensor, second: Tensor, mask: Tensor, step: int, lr: float,
    beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    """Adam with a masked gradient, in place, in one pass over memory."""
    size = parameters.numel()
    k._adam_kernel[triton.cdiv(size, k.BLOCK),](parameters, gradient, first, second, mask, size,
        lr / (1 - beta1**step), (1 - beta2**step) ** 0.5, eps, 1 - beta1, beta2, 1 - beta2, BLOCK=k.BLOCK,
    )  # fmt: skip
