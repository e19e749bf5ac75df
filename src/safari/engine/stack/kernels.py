"""Triton kernels for what a small convolutional net spends its time on, many clients at once.

Activations are `[clients · n, h, w, channels]`, weights `[clients, 9, in, out]`, both bfloat16; sums are
float32. A 3x3 convolution of few channels reads and writes little more than its operands; batch norm's
statistics are taken while the convolution's result is still in registers. Layers with more channels, and 1x1
convolutions, go to `wide_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from safari.engine.stack import wide_kernels as wide
from safari.engine.stack.served import is_wide

BLOCK = 1024


@dataclass(frozen=True)
class Tile:
    """Tile of a kernel: rows (pixels) of a program, its warps, its load stages."""

    rows: int
    warps: int
    stages: int


# By the number of input channels. From measurements on an H200 of an earlier cut of these kernels: worth
# measuring again (benchmarks/kernels.py).
CONV_TILES = {16: Tile(128, 4, 3), 32: Tile(128, 4, 3), 64: Tile(64, 4, 3)}
WEIGHT_TILES = {16: Tile(64, 4, 3), 32: Tile(64, 4, 3), 64: Tile(64, 4, 3)}


@triton.jit
def _conv_kernel(
    x, w, y, partial, n, blocks,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    CIN: tl.constexpr, COUT: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    # The sizes are known to the compiler: division by an unknown one is slow.
    block, client = tl.program_id(0), tl.program_id(1)
    pixels = n * OH * OW
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < pixels
    column, line, image = rows % OW, (rows // OW) % OH, rows // (OW * OH)
    ci, co = tl.arange(0, CIN), tl.arange(0, COUT)
    x += client.to(tl.int64) * n * H * W * CIN
    y += client.to(tl.int64) * pixels * COUT
    w += client.to(tl.int64) * 9 * CIN * COUT
    total = tl.zeros([ROWS, COUT], tl.float32)
    # The mask of a load depends on the pixel alone, so that a pixel's channels are loaded at one go.
    for tap in tl.static_range(9):
        i, j = line * STRIDE + tap // 3 - 1, column * STRIDE + tap % 3 - 1
        valid = inside & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        place = x + ((image * H + i) * W + j)[:, None] * CIN + ci[None, :]
        values = tl.load(place, mask=valid[:, None], other=0.0)
        weights = tl.load(w + (tap * CIN + ci[:, None]) * COUT + co[None, :])
        total = tl.dot(values, weights, total)
    tl.store(y + rows[:, None] * COUT + co[None, :], total.to(y.dtype.element_ty), mask=inside[:, None])
    if STATS:
        place = partial + ((client * blocks + block) * 2) * COUT + co
        tl.store(place, tl.sum(total, 0))
        tl.store(place + COUT, tl.sum(total * total, 0))


@triton.jit
def _conv_input_kernel(
    dy, w, dx, n, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    CIN: tl.constexpr, COUT: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # For strides above 1; with stride 1 it is a convolution with the weights turned round.
    block, client = tl.program_id(0), tl.program_id(1)
    pixels = n * H * W
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < pixels
    column, line, image = rows % W, (rows // W) % H, rows // (W * H)
    ci, co = tl.arange(0, CIN), tl.arange(0, COUT)
    dy += client.to(tl.int64) * n * OH * OW * COUT
    dx += client.to(tl.int64) * pixels * CIN
    w += client.to(tl.int64) * 9 * CIN * COUT
    total = tl.zeros([ROWS, CIN], tl.float32)
    for tap in tl.static_range(9):
        up, left = line + 1 - tap // 3, column + 1 - tap % 3
        i, j = up // STRIDE, left // STRIDE
        valid = inside & (up >= 0) & (left >= 0) & (i < OH) & (j < OW)
        valid = valid & (up % STRIDE == 0) & (left % STRIDE == 0)
        values = tl.load(
            dy + ((image * OH + i) * OW + j)[:, None] * COUT + co[None, :], mask=valid[:, None], other=0.0
        )
        # w holds the weights turned round: [9 taps from the last to the first, out, in].
        weights = tl.load(w + ((8 - tap) * COUT + co[:, None]) * CIN + ci[None, :])
        total = tl.dot(values, weights, total)
    tl.store(dx + rows[:, None] * CIN + ci[None, :], total.to(dx.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _conv_weight_kernel(
    x, dy, partial, n, clients, per_split,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    CIN: tl.constexpr, COUT: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    split, client, kh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pixels = n * OH * OW
    ci, co = tl.arange(0, CIN), tl.arange(0, COUT)
    x += client.to(tl.int64) * n * H * W * CIN
    dy += client.to(tl.int64) * pixels * COUT
    left = tl.zeros([CIN, COUT], tl.float32)
    middle = tl.zeros([CIN, COUT], tl.float32)
    right = tl.zeros([CIN, COUT], tl.float32)
    for start in range(split * per_split, (split + 1) * per_split, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = rows < pixels
        column, line, image = rows % OW, (rows // OW) % OH, rows // (OW * OH)
        d = tl.load(dy + rows[:, None] * COUT + co[None, :], mask=inside[:, None], other=0.0)
        i, j = line * STRIDE + kh - 1, column * STRIDE - 1
        above = inside & (i >= 0) & (i < H)
        place = x + ((image * H + i) * W + j)[:, None] * CIN + ci[None, :]
        values = tl.load(place, mask=(above & (j >= 0))[:, None], other=0.0)
        left = tl.dot(tl.trans(values), d, left)
        values = tl.load(place + CIN, mask=(above & (j + 1 < W))[:, None], other=0.0)
        middle = tl.dot(tl.trans(values), d, middle)
        values = tl.load(place + 2 * CIN, mask=(above & (j + 2 < W))[:, None], other=0.0)
        right = tl.dot(tl.trans(values), d, right)
    place = partial + (((split * clients + client) * 9 + kh * 3) * CIN + ci[:, None]) * COUT + co[None, :]
    tl.store(place, left)
    tl.store(place + CIN * COUT, middle)
    tl.store(place + 2 * CIN * COUT, right)


@triton.jit
def _weights_kernel(weight, w, turned, inner, CIN: tl.constexpr, COUT: tl.constexpr, BLOCK: tl.constexpr):
    # float32 [clients, out, in, 3, 3] -> [clients, 9, in, out], and [clients, 9 from last to first, out, in].
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < 9 * CIN * COUT
    tap, ci, co = at // (CIN * COUT), (at // COUT) % CIN, at % COUT
    real = inside & (ci < inner)
    value = tl.load(weight + ((client * COUT + co) * inner + ci) * 9 + tap, mask=real, other=0.0)
    tl.store(w + client * 9 * CIN * COUT + at, value.to(w.dtype.element_ty), mask=inside)
    spot = client * 9 * CIN * COUT + ((8 - tap) * COUT + co) * CIN + ci
    tl.store(turned + spot, value.to(w.dtype.element_ty), mask=inside)


@triton.jit
def _weight_gradient_total_kernel(
    partial, out, splits, inner, clients, CIN: tl.constexpr, COUT: tl.constexpr, BLOCK: tl.constexpr
):
    # The splits' sum, [clients, 9, in, out], in the weight's own order [clients, out, in, 3, 3].
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < 9 * CIN * COUT
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(partial + (split * clients + client) * 9 * CIN * COUT + at, mask=inside, other=0.0)
    tap, ci, co = at // (CIN * COUT), (at // COUT) % CIN, at % COUT
    tl.store(out + ((client * COUT + co) * inner + ci) * 9 + tap, total, mask=inside & (ci < inner))


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
    var = tl.sum(two, 0) / count - mu * mu
    var = tl.where(var < 0, 0.0, var)
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
        # Not by maximum, which makes a number of NaN.
        value = tl.where(value <= 0, 0.0, value)
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
            cut = tl.load(out + at, mask=inside, other=0.0).to(tl.float32) <= 0
        else:
            cut = values * tl.load(scale + place) + tl.load(shift + place) <= 0
        grad = tl.where(cut, 0.0, grad)
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
            cut = tl.load(out + at, mask=inside, other=0.0).to(tl.float32) <= 0
        else:
            cut = values * factor + tl.load(shift + place) <= 0
        grad = tl.where(cut, 0.0, grad)
    if RESIDUAL:
        tl.store(dresidual + at, grad.to(dresidual.dtype.element_ty), mask=inside)
    normal = (values - tl.load(mean + place)) * tl.load(rstd + place)
    total = tl.load(sums + place) / count
    along = tl.load(sums + clients * C + place) / count
    tl.store(dy + at, (factor * (grad - total - normal * along)).to(dy.dtype.element_ty), mask=inside)


@triton.jit
def _adam_kernel(
    p, g, first, second, mask, size, step_size, root, eps, rest1, beta2, rest2, BLOCK: tl.constexpr
):
    # 1 - beta comes from the host: in float32, 1 - 0.999 is off by 1e-5.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    kept = tl.load(mask + at, mask=inside, other=0) != 0
    grad = tl.where(kept, tl.load(g + at, mask=inside, other=0.0), 0.0)
    m = tl.load(first + at, mask=inside, other=0.0)
    m += rest1 * (grad - m)
    v = tl.load(second + at, mask=inside, other=0.0) * beta2 + rest2 * grad * grad
    value = tl.load(p + at, mask=inside, other=0.0) - step_size * m / (tl.sqrt(v) / root + eps)
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, v, mask=inside)
    tl.store(p + at, value, mask=inside)


@triton.jit
def _sgd_kernel(p, g, mask, rate, units, UNIT: tl.constexpr, TENSOR: tl.constexpr, BLOCK: tl.constexpr):
    # `rate` is a number, or where it is. There are units of UNIT numbers: those of a unit are loaded at one go.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at // UNIT < units
    kept = tl.load(mask + at, mask=inside, other=0) != 0
    grad = tl.where(kept, tl.load(g + at, mask=inside, other=0.0), 0.0)
    if TENSOR:
        rate = tl.load(rate)
    tl.store(p + at, tl.load(p + at, mask=inside, other=0.0) - rate * grad, mask=inside)


@triton.jit
def _scaled_sgd_kernel(
    p, g, mask, shift, scale, rate, weight, limit, each, TENSOR: tl.constexpr, BLOCK: tl.constexpr
):
    # A step along (weight · g + shift) / scale, clipped at ±limit. A tensor of all clients has `each` numbers of each;
    # shift and scale are those of one, for all.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < each
    own = tl.program_id(1).to(tl.int64) * each + at
    kept = tl.load(mask + own, mask=inside, other=0) != 0
    grad = tl.load(g + own, mask=inside, other=0.0)
    mixed = weight * grad + tl.load(shift + at, mask=inside, other=0.0)
    mixed = mixed / tl.load(scale + at, mask=inside, other=1.0)
    # Not by minimum and maximum, which make a number of NaN.
    mixed = tl.where(mixed > limit, limit, tl.where(mixed < -limit, -limit, mixed))
    if TENSOR:
        rate = tl.load(rate)
    step = tl.where(kept, rate * mixed, 0.0)
    tl.store(p + own, tl.load(p + own, mask=inside, other=0.0) - step, mask=inside)


@triton.jit
def _crops_kernel(
    data, index, shift, flip, out, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    picture = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < C * H * W
    j, i, c = at % W, (at // W) % H, at // (W * H)
    source = tl.load(index + picture)
    down, right = tl.load(shift + 2 * picture), tl.load(shift + 2 * picture + 1)
    turned = tl.load(flip + picture) != 0
    i = i + down - PAD
    j = tl.where(turned, W - 1 - j, j) + right - PAD
    valid = inside & (i >= 0) & (i < H) & (j >= 0) & (j < W)
    value = tl.load(data + source * (C * H * W) + (c * H + i) * W + j, mask=valid, other=0.0)
    tl.store(out + picture * (C * H * W) + at, value, mask=inside)


def weights_for(weight: Tensor, cin: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """float32 `[clients, out, in, side, side]` in the orders for both passes, `in` padded to `cin` with zeros."""
    clients, cout, inner, side, _ = weight.shape
    if is_wide(cin, cout, side):
        w = wide.weights_for(weight, cin, dtype)
        return w, w
    w, turned = torch.empty((2, clients, 9 * cin * cout), dtype=dtype, device=weight.device).unbind()
    grid = (triton.cdiv(9 * cin * cout, BLOCK), clients)
    _weights_kernel[grid](weight.contiguous(), w, turned, inner, CIN=cin, COUT=cout, BLOCK=BLOCK)
    return w, turned


def conv(
    x: Tensor, w: Tensor, cout: int, clients: int, stride: int, stats: bool, tile: Tile | None = None,
    side: int = 3,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Convolution side x side with padding side // 2, and the partial sums that batch norm needs."""
    total, h, wd, cin = x.shape
    if is_wide(cin, cout, side):
        return wide.conv(x, w, stride, stats)
    tile = tile or CONV_TILES.get(cin, Tile(128, 4, 3))
    n, oh, ow = total // clients, (h - 1) // stride + 1, (wd - 1) // stride + 1
    blocks = triton.cdiv(n * oh * ow, tile.rows)
    y = torch.empty((total, oh, ow, cout), dtype=x.dtype, device=x.device)
    partial = torch.empty((clients, blocks, 2, cout) if stats else (0,), device=x.device)
    _conv_kernel[blocks, clients](
        x, w, y, partial, n, blocks,
        H=h, W=wd, OH=oh, OW=ow, CIN=cin, COUT=cout, STRIDE=stride, ROWS=tile.rows, STATS=stats,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y, partial


def conv_input_gradient(
    dy: Tensor, turned: Tensor, cin: int, clients: int, stride: int, h: int, wd: int, side: int = 3
) -> Tensor:
    """The gradient with respect to the input of `conv`."""
    total, oh, ow, cout = dy.shape
    if is_wide(cin, cout, side):
        return wide.conv_input_gradient(dy, turned, stride, h, wd)
    if stride == 1:
        return conv(dy, turned, cin, clients, 1, stats=False)[0]
    n, rows = total // clients, 128
    dx = torch.empty((total, h, wd, cin), dtype=dy.dtype, device=dy.device)
    _conv_input_kernel[triton.cdiv(n * h * wd, rows), clients](
        dy, turned, dx, n, H=h, W=wd, OH=oh, OW=ow, CIN=cin, COUT=cout, STRIDE=stride, ROWS=rows
    )
    return dx


def conv_weight_gradient(
    x: Tensor,
    dy: Tensor,
    inner: int,
    clients: int,
    stride: int,
    tile: Tile | None = None,
    programs: int = 2048,
    side: int = 3,
) -> Tensor:
    """The gradient with respect to the weights of `conv`, float32 `[clients, out, in, side, side]`."""
    total, h, wd, cin = x.shape
    _, oh, ow, cout = dy.shape
    if is_wide(cin, cout, side):
        return wide.conv_weight_gradient(x, dy, inner, clients, stride, side)
    tile = tile or WEIGHT_TILES.get(cin, Tile(128, 4, 3))
    pixels = total // clients * oh * ow
    # Enough programs to fill the device, each with enough pixels to be worth its share of the sum.
    splits = max(1, min(pixels // (4 * tile.rows), programs // (3 * clients)))
    per_split = triton.cdiv(triton.cdiv(pixels, splits), tile.rows) * tile.rows
    partial = torch.empty((splits, clients, 9 * cin * cout), device=x.device)
    _conv_weight_kernel[splits, clients, 3](
        x, dy, partial, total // clients, clients, per_split,
        H=h, W=wd, OH=oh, OW=ow, CIN=cin, COUT=cout, STRIDE=stride, ROWS=tile.rows,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    out = torch.empty((clients, cout, inner, 3, 3), device=x.device)
    _weight_gradient_total_kernel[triton.cdiv(9 * cin * cout, 256), clients](
        partial, out, splits, inner, clients, CIN=cin, COUT=cout, BLOCK=256
    )
    return out
