"""Convolution, batch norm, shortcut and ReLU as one differentiable step over many clients (CUDA)."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from safari.engine.stack import kernels as k

_BLOCK = 1024
_NARROWEST, _WIDEST = 16, 128


def serves(inner: int, outer: int) -> bool:
    """Are these numbers of channels among those that the kernels are written for?

    Fewer than 16 inputs are padded with zeros; beyond 128 a tile would not fit the registers.
    """
    fits = [_NARROWEST <= c <= _WIDEST and c & (c - 1) == 0 for c in (max(inner, _NARROWEST), outer)]
    return all(fits)


class ConvNorm(torch.autograd.Function):
    """`relu(batch_norm(conv3x3(x)) + residual)` with each client's own weights and statistics.

    x and residual are `[clients · n, h, w, channels]`, in bfloat16 or float32; the weight `[clients, out, in, 3, 3]` and
    the norm's parameters `[clients, out]` in float32. The running statistics are updated in place.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, residual: Tensor | None,
        running_mean: Tensor, running_var: Tensor, stride: int, relu: bool, momentum: float, eps: float,
    ) -> Tensor:  # fmt: skip
        """The step; what the backward pass needs is saved."""
        clients = weight.shape[0]
        if x.shape[-1] < _NARROWEST:
            x = torch.nn.functional.pad(x, (0, _NARROWEST - x.shape[-1]))
        x = x.contiguous()
        w = _for_kernel(weight, x)
        y, partial = k.conv(x, w, clients, stride, stats=True)
        channels, blocks = y.shape[-1], partial.shape[1]
        size = y.numel() // clients
        mean, rstd, scale, shift = torch.empty((4, clients, channels), device=x.device).unbind()
        k._launch(
            k._norm_statistics_kernel, (clients,), partial, gamma, beta, mean, rstd, scale, shift,
            running_mean, running_var, blocks, size // channels, momentum, eps, C=channels, ROWS=64,
        )  # fmt: skip
        out = torch.empty_like(y)
        residual = None if residual is None else residual.contiguous()
        k._launch(
            k._norm_apply_kernel, (triton.cdiv(size, _BLOCK), clients), y, scale, shift,
            y if residual is None else residual, out, size,
            C=channels, RESIDUAL=residual is not None, RELU=relu, BLOCK=_BLOCK,
        )  # fmt: skip
        ctx.save_for_backward(x, w, y, out, mean, rstd, scale, shift)
        ctx.facts = (clients, stride, relu, residual is not None, weight.shape[2])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients with respect to x, weight, gamma, beta and residual."""
        x, w, y, out, mean, rstd, scale, shift = ctx.saved_tensors
        clients, stride, relu, has_residual, inner = ctx.facts
        grad = grad.contiguous()
        channels = y.shape[-1]
        size = y.numel() // clients
        rows = size // channels
        blocks = triton.cdiv(rows, k.ROWS)
        common = {"C": channels, "RESIDUAL": has_residual, "RELU": relu}
        partial = torch.empty((clients, blocks, 2, channels), device=x.device)
        k._launch(
            k._norm_gradient_sums_kernel, (blocks, clients), grad, y, out, mean, rstd, scale, shift, partial,
            rows, blocks, ROWS=k.ROWS, **common,
        )  # fmt: skip
        sums = torch.empty((2, clients, channels), device=x.device)
        k._launch(k._norm_gradient_total_kernel, (clients,), partial, sums, blocks, C=channels, ROWS=64)
        dy = torch.empty_like(y)
        dresidual = torch.empty_like(y) if has_residual else None
        k._launch(
            k._norm_gradient_kernel, (triton.cdiv(size, _BLOCK), clients), grad, y, out, mean, rstd, scale,
            shift, sums, dy, dy if dresidual is None else dresidual, size, rows, clients,
            BLOCK=_BLOCK, **common,
        )  # fmt: skip
        dx = None
        if ctx.needs_input_grad[0]:
            dx = k.conv_input_gradient(dy, w, clients, stride, x.shape[1], x.shape[2])[..., :inner]
        dw = _from_kernel(k.conv_weight_gradient(x, dy, clients, stride), inner)
        return dx, dw, sums[1], sums[0], dresidual, *[None] * 6


def adam_(
    parameters: Tensor, gradient: Tensor, first: Tensor, second: Tensor, mask: Tensor, step: int, lr: float,
    beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    """Adam with a masked gradient, in place, in one pass over memory."""
    size = parameters.numel()
    k._launch(
        k._adam_kernel, (triton.cdiv(size, _BLOCK),), parameters, gradient, first, second, mask, size,
        lr / (1 - beta1**step), (1 - beta2**step) ** 0.5, eps, beta1, beta2, BLOCK=_BLOCK,
    )  # fmt: skip


def _for_kernel(weight: Tensor, x: Tensor) -> Tensor:
    """`[clients, out, in, 3, 3]` as `[clients, 9, in, out]`, with x's type and number of channels."""
    w = weight.detach().permute(0, 3, 4, 2, 1).flatten(1, 2)
    if w.shape[2] < x.shape[-1]:
        w = torch.nn.functional.pad(w, (0, 0, 0, x.shape[-1] - w.shape[2]))
    return w.to(x.dtype).contiguous()


def _from_kernel(dw: Tensor, inner: int) -> Tensor:
    """The gradient in the weight's own order."""
    return dw[:, :, :inner].unflatten(1, (3, 3)).permute(0, 4, 3, 1, 2)
