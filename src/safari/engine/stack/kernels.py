"""Triton kernels for what a small convolutional net spends its time on, many clients at once.

Activations are `[clients · n, h, w, channels]`, weights `[clients, 9, in, out]`, in bfloat16 or float32; sums
are float32. A 3x3
convolution of 16 to 128 channels reads and writes little more than its operands; batch norm's statistics are
taken while the convolution's result is still in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 128


@triton.jit
def _conv_kernel(
    x, w, y, partial, n, h, wd, oh, ow, blocks,
    CIN: tl.constexpr, COUT: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    block, client = tl.program_id(0), tl.program_id(1)
    pixels = n * oh * ow
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < pixels
    column, line, image = rows % ow, (rows // ow) % oh, rows // (ow * oh)
    ci, co = tl.arange(0, CIN), tl.arange(0, COUT)
    x += client.to(tl.int64) * n * h * wd * CIN
    y += client.to(tl.int64) * pixels * COUT
    w += client.to(tl.int64) * 9 * CIN * COUT
    total = tl.zeros([ROWS, COUT], tl.float32)
    for tap in tl.static_range(9):
        i, j = line * STRIDE + tap // 3 - 1, column * STRIDE + tap % 3 - 1
        valid = inside & (i >= 0) & (i < h) & (j >= 0) & (j < wd)
        values = tl.load(
            x + ((image * h + i) * wd + j)[:, None] * CIN + ci[None, :], mask=valid[:, None], other=0.0
        )
        weights = tl.load(w + (tap * CIN + ci[:, None]) * COUT + co[None, :])
        total = tl.dot(values, weights, total, input_precision="ieee")
    tl.store(y + rows[:, None] * COUT + co[None, :], total.to(y.dtype.element_ty), mask=inside[:, None])
    if STATS:
        place = partial + ((client * blocks + block) * 2) * COUT + co
        tl.store(place, tl.sum(total, 0))
        tl.store(place + COUT, tl.sum(total * total, 0))


@triton.jit
def _conv_input_kernel(
    dy, w, dx, n, h, wd, oh, ow,
    CIN: tl.constexpr, COUT: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    block, client = tl.program_id(0), tl.program_id(1)
    pixels = n * h * wd
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < pixels
    column, line, image = rows % wd, (rows // wd) % h, rows // (wd * h)
    ci, co = tl.arange(0, CIN), tl.arange(0, COUT)
    dy += client.to(tl.int64) * n * oh * ow * COUT
    dx += client.to(tl.int64) * pixels * CIN
    w += client.to(tl.int64) * 9 * CIN * COUT
    total = tl.zeros([ROWS, CIN], tl.float32)
    for tap in tl.static_range(9):
        up, left = line + 1 - tap // 3, column + 1 - tap % 3
        i, j = up // STRIDE, left // STRIDE
        valid = inside & (up >= 0) & (left >= 0) & (i < oh) & (j < ow)
        if STRIDE > 1:
            valid = valid & (up % STRIDE == 0) & (left % STRIDE == 0)
        values = tl.load(
            dy + ((image * oh + i) * ow + j)[:, None] * COUT + co[None, :], mask=valid[:, None], other=0.0
        )
        weights = tl.load(w + (tap * CIN + ci[:, None]) * COUT + co[None, :])
        total = tl.dot(values, tl.trans(weights), total, input_precision="ieee")
    tl.store(dx + rows[:, None] * CIN + ci[None, :], total.to(dx.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _conv_weight_kernel(
    x, dy, partial, n, h, wd, oh, ow, clients, per_split,
    CIN: tl.constexpr, COUT: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    split, client, kh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pixels = n * oh * ow
    ci, co = tl.arange(0, CIN), tl.arange(0, COUT)
    x += client.to(tl.int64) * n * h * wd * CIN
    dy += client.to(tl.int64) * pixels * COUT
    left = tl.zeros([CIN, COUT], tl.float32)
    middle = tl.zeros([CIN, COUT], tl.float32)
    right = tl.zeros([CIN, COUT], tl.float32)
    for start in range(split * per_split, (split + 1) * per_split, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = rows < pixels
        column, line, image = rows % ow, (rows // ow) % oh, rows // (ow * oh)
        d = tl.load(dy + rows[:, None] * COUT + co[None, :], mask=inside[:, None], other=0.0)
        i = line * STRIDE + kh - 1
        above = inside & (i >= 0) & (i < h)
        base = (image * h + i) * wd + column * STRIDE - 1
        for kw in tl.static_range(3):
            j = column * STRIDE + kw - 1
            valid = above & (j >= 0) & (j < wd)
            values = tl.load(x + (base + kw)[:, None] * CIN + ci[None, :], mask=valid[:, None], other=0.0)
            if kw == 0:
                left = tl.dot(tl.trans(values), d, left, input_precision="ieee")
            elif kw == 1:
                middle = tl.dot(tl.trans(values), d, middle, input_precision="ieee")
            else:
                right = tl.dot(tl.trans(values), d, right, input_precision="ieee")
    place = partial + (((split * clients + client) * 9 + kh * 3) * CIN + ci[:, None]) * COUT + co[None, :]
    tl.store(place, left)
    tl.store(place + CIN * COUT, middle)
    tl.store(place + 2 * CIN * COUT, right)


@triton.jit
def _norm_statistics_kernel(
    partial, weight, bias, mean, rstd, scale, shift, running_mean, running_var,
    blocks, count, momentum, eps, C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0)
    c, r = tl.arange(0, C), tl.arange(0, ROWS)
    one = tl.zeros([ROWS, C], tl.float32)
    two = tl.zeros([ROWS, C], tl.float32)
    for start in range(0, blocks, ROWS):
        row = start + r
        place = partial + ((client * blocks + row)[:, None] * 2) * C + c[None, :]
        one += tl.load(place, mask=(row < blocks)[:, None], other=0.0)
        two += tl.load(place + C, mask=(row < blocks)[:, None], other=0.0)
    mu = tl.sum(one, 0) / count
    var = tl.maximum(tl.sum(two, 0) / count - mu * mu, 0.0)
    inverse = 1.0 / tl.sqrt(var + eps)
    place = client * C + c
    factor = tl.load(weight + place) * inverse
    tl.store(mean + place, mu)
    tl.store(rstd + place, inverse)
    tl.store(scale + place, factor)
    tl.store(shift + place, tl.load(bias + place) - mu * factor)
    old_mean, old_var = tl.load(running_mean + place), tl.load(running_var + place)
    tl.store(running_mean + place, old_mean + momentum * (mu - old_mean))
    tl.store(running_var + place, old_var + momentum * (var * (count / (count - 1)) - old_var))


@triton.jit
def _norm_apply_kernel(
    y, scale, shift, residual, out, size,
    C: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    base = client.to(tl.int64) * size
    place = client * C + at % C
    value = tl.load(y + base + at, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.load(scale + place) + tl.load(shift + place)
    if RESIDUAL:
        value += tl.load(residual + base + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0)
    tl.store(out + base + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_gradient_sums_kernel(
    g, y, out, mean, rstd, scale, shift, partial, rows_per_client, blocks,
    C: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    block, client = tl.program_id(0), tl.program_id(1)
    row, c = block * ROWS + tl.arange(0, ROWS), tl.arange(0, C)
    inside = (row < rows_per_client)[:, None]
    at = client.to(tl.int64) * rows_per_client * C + row[:, None] * C + c[None, :]
    place = (client * C + c)[None, :]
    values = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        if RESIDUAL:
            alive = tl.load(out + at, mask=inside, other=0.0).to(tl.float32) > 0
        else:
            alive = values * tl.load(scale + place) + tl.load(shift + place) > 0
        grad = tl.where(alive, grad, 0.0)
    normal = (values - tl.load(mean + place)) * tl.load(rstd + place)
    spot = partial + ((client * blocks + block) * 2) * C + c
    tl.store(spot, tl.sum(grad, 0))
    tl.store(spot + C, tl.sum(grad * normal, 0))


@triton.jit
def _norm_gradient_total_kernel(
    partial, sums, blocks, C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0)
    c, r = tl.arange(0, C), tl.arange(0, ROWS)
    one = tl.zeros([ROWS, C], tl.float32)
    two = tl.zeros([ROWS, C], tl.float32)
    for start in range(0, blocks, ROWS):
        row = start + r
        place = partial + ((client * blocks + row)[:, None] * 2) * C + c[None, :]
        one += tl.load(place, mask=(row < blocks)[:, None], other=0.0)
        two += tl.load(place + C, mask=(row < blocks)[:, None], other=0.0)
    clients = tl.num_programs(0)
    tl.store(sums + client * C + c, tl.sum(one, 0))
    tl.store(sums + (clients + client) * C + c, tl.sum(two, 0))


@triton.jit
def _norm_gradient_kernel(
    g, y, out, mean, rstd, scale, shift, sums, dy, dresidual, size, count, clients,
    C: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    place = client * C + at % C
    at = client.to(tl.int64) * size + at
    values = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(scale + place)
    if RELU:
        if RESIDUAL:
            alive = tl.load(out + at, mask=inside, other=0.0).to(tl.float32) > 0
        else:
            alive = values * factor + tl.load(shift + place) > 0
        grad = tl.where(alive, grad, 0.0)
    if RESIDUAL:
        tl.store(dresidual + at, grad.to(dresidual.dtype.element_ty), mask=inside)
    normal = (values - tl.load(mean + place)) * tl.load(rstd + place)
    total = tl.load(sums + place) / count
    along = tl.load(sums + clients * C + place) / count
    tl.store(dy + at, (factor * (grad - total - normal * along)).to(dy.dtype.element_ty), mask=inside)


@triton.jit
def _adam_kernel(p, g, first, second, mask, size, step_size, root, eps, beta1, beta2, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    kept = tl.load(mask + at, mask=inside, other=0) != 0
    grad = tl.where(kept, tl.load(g + at, mask=inside, other=0.0), 0.0)
    m = tl.load(first + at, mask=inside, other=0.0)
    m += (1 - beta1) * (grad - m)
    v = tl.load(second + at, mask=inside, other=0.0) * beta2 + (1 - beta2) * grad * grad
    value = tl.load(p + at, mask=inside, other=0.0) - step_size * m / (tl.sqrt(v) / root + eps)
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, v, mask=inside)
    tl.store(p + at, value, mask=inside)


def conv(x: Tensor, w: Tensor, clients: int, stride: int, stats: bool) -> tuple[Tensor, Tensor]:
    """3x3 convolution with padding 1: x `[clients · n, h, w, in]`, w `[clients, 9, in, out]`; with partial sums."""
    total, h, wd, cin = x.shape
    n, cout = total // clients, w.shape[-1]
    oh, ow = (h - 1) // stride + 1, (wd - 1) // stride + 1
    blocks = triton.cdiv(n * oh * ow, ROWS)
    y = torch.empty((total, oh, ow, cout), dtype=x.dtype, device=x.device)
    partial = torch.empty((clients, blocks, 2, cout) if stats else (0,), device=x.device)
    _launch(
        _conv_kernel, (blocks, clients), x, w, y, partial, n, h, wd, oh, ow, blocks,
        CIN=cin, COUT=cout, STRIDE=stride, ROWS=ROWS, STATS=stats,
    )  # fmt: skip
    return y, partial


def conv_input_gradient(dy: Tensor, w: Tensor, clients: int, stride: int, h: int, wd: int) -> Tensor:
    """The gradient with respect to the input of `conv`."""
    total, oh, ow, cout = dy.shape
    cin, n = w.shape[2], total // clients
    dx = torch.empty((total, h, wd, cin), dtype=dy.dtype, device=dy.device)
    _launch(
        _conv_input_kernel, (triton.cdiv(n * h * wd, ROWS), clients), dy, w, dx, n, h, wd, oh, ow,
        CIN=cin, COUT=cout, STRIDE=stride, ROWS=ROWS,
    )  # fmt: skip
    return dx


def conv_weight_gradient(x: Tensor, dy: Tensor, clients: int, stride: int) -> Tensor:
    """The gradient with respect to the weights of `conv`, float32 `[clients, 9, in, out]`."""
    total, h, wd, cin = x.shape
    _, oh, ow, cout = dy.shape
    n = total // clients
    pixels = n * oh * ow
    splits = max(1, min(64, pixels // 1024, 2048 // (3 * clients)))
    per_split = triton.cdiv(triton.cdiv(pixels, splits), ROWS) * ROWS
    partial = torch.empty((splits, clients, 9, cin, cout), device=x.device)
    _launch(
        _conv_weight_kernel, (splits, clients, 3), x, dy, partial, n, h, wd, oh, ow, clients, per_split,
        CIN=cin, COUT=cout, STRIDE=stride, ROWS=ROWS,
    )  # fmt: skip
    return partial.sum(0) if splits > 1 else partial[0]


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    kernel[grid](*args, **constants)
