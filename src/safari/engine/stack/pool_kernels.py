"""Triton kernels for a 3x3 convolution with bias, ReLU and 2x2 max pooling as one step, many clients at once.

A program works on windows: the 2x2 pixels that become one pooled pixel. Their convolution reads a patch of 4x4 pixels.
By pixel, a line of a patch lies together in memory, 4 · in numbers, so that a line is one load and one matrix product
with weights in which the two columns of a window stand side by side, with zeros where a column does not reach. For
pictures with few channels the whole patch is one product (`whole_patch`), read from pictures with a frame of zeros.
What the convolution gives before pooling is never stored: a byte for each pooled number says which pixel of its window
won, and both gradients read the pooled gradient and that byte.

Activations are `[clients · n, h, w, channels]` in bfloat16; sums are float32. Windows are as in torch: of an odd
number of lines the last is pooled nowhere. NaN spreads as in torch; next to an infinite number there may be more
of it, for infinity times one of those zeros is NaN.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from safari.engine.stack.kernels import BLOCK, Tile
from safari.engine.stack.served import whole_patch

# In `winner`: the ReLU made this one 0, and no pixel gets its gradient.
CUT = tl.constexpr(4)
# The fastest of those that benchmarks/kernels.py --fedawe tried for its CNN on an H200 (results/engine).
CONV_TILE = Tile(128, 4, 1)
INPUT_TILE = Tile(64, 4, 1)
WEIGHT_TILE = Tile(64, 8, 3)
PATCH_CONV_TILE = Tile(128, 4, 1)
PATCH_WEIGHT_TILE = Tile(64, 4, 1)
# The number of programs for the weights' gradient, from the same search; each writes sums of its own.
PROGRAMS = 264


@triton.jit
def _pack_kernel(
    x, out, size, image, line, column, channel, inner,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Pictures of any strides and type -> by pixel, with zeros for the channels that are missing and in a frame.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c, pixel = at % CIN, at // CIN
    j, i = pixel % (W + 2 * FRAME) - FRAME, (pixel // (W + 2 * FRAME)) % (H + 2 * FRAME) - FRAME
    which = pixel // ((W + 2 * FRAME) * (H + 2 * FRAME))
    place = x + which * image + i * line + j * column + c * channel
    real = (at < size) & (c < inner) & (i >= 0) & (i < H) & (j >= 0) & (j < W)
    value = tl.load(place, mask=real, other=0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def _weights_kernel(
    weight, w, inner, CIN: tl.constexpr, COUT: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr
):
    # float32 [clients, out, inner, 3, 3] -> [clients, 3, 4 · in, 2 · out]: for each line of the 3x3, from a line of a
    # patch (pixel, channel) to both columns of a window. The columns of a channel stand side by side: (out, column).
    # TURNED, for the input's gradient: lines and columns from last to first, from (pixel, out) to (column, in).
    FROM: tl.constexpr = COUT if TURNED else CIN
    TO: tl.constexpr = CIN if TURNED else COUT
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < 3 * 4 * FROM * 2 * TO
    end, row, kh = at % (2 * TO), (at // (2 * TO)) % (4 * FROM), at // (2 * TO * 4 * FROM)
    pixel, source = row // FROM, row % FROM
    if TURNED:
        co, ci = source, end % TO
        kw = 2 - (pixel - end // TO)
        kh = 2 - kh
    else:
        ci, co = source, end // 2
        kw = pixel - end % 2
    real = inside & (kw >= 0) & (kw < 3) & (ci < inner)
    value = tl.load(weight + ((client * COUT + co) * inner + ci) * 9 + kh * 3 + kw, mask=real, other=0.0)
    tl.store(w + client * 3 * 4 * FROM * 2 * TO + at, value.to(w.dtype.element_ty), mask=inside)


@triton.jit
def _patch_weights_kernel(weight, w, inner, CIN: tl.constexpr, COUT: tl.constexpr, BLOCK: tl.constexpr):
    # float32 [clients, out, inner, 3, 3] -> [clients, 2, 16 · in, 2 · out]: from a whole patch (line, pixel, channel)
    # to the upper pixels of a window, and to the lower ones; columns as above.
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < 2 * 16 * CIN * 2 * COUT
    end, row, half = at % (2 * COUT), (at // (2 * COUT)) % (16 * CIN), at // (2 * COUT * 16 * CIN)
    ci, co = row % CIN, end // 2
    kh, kw = row // (4 * CIN) - half, (row // CIN) % 4 - end % 2
    real = inside & (kh >= 0) & (kh < 3) & (kw >= 0) & (kw < 3) & (ci < inner)
    value = tl.load(weight + ((client * COUT + co) * inner + ci) * 9 + kh * 3 + kw, mask=real, other=0.0)
    tl.store(w + client * 2 * 16 * CIN * 2 * COUT + at, value.to(w.dtype.element_ty), mask=inside)


@triton.jit
def _patches(
    x, column, line, image, inside,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr,
):  # fmt: skip
    # The whole patches of some windows, [windows, 16 · in], from pictures with a frame: no pixel is outside.
    k = tl.arange(0, 16 * CIN)
    corner = ((image * (H + 2) + 2 * line) * (W + 2) + 2 * column) * CIN
    place = x + corner[:, None] + ((k // (4 * CIN)) * ((W + 2) * CIN) + k % (4 * CIN))[None, :]
    return tl.load(place, mask=inside[:, None], other=0.0)


@triton.jit
def _unpooled_windows(grad, winner, rows, inside, ROWS: tl.constexpr, COUT: tl.constexpr):
    # The gradients of the upper pixels of some windows and of the lower ones, and their sums in float32.
    at = rows[:, None] * COUT + tl.arange(0, COUT)[None, :]
    values = tl.load(grad + at, mask=inside[:, None], other=0.0)
    code = tl.load(winner + at, mask=inside[:, None], other=CUT)
    total = tl.where(code == CUT, 0.0, values.to(tl.float32))
    return _unpooled(values, code, 0, ROWS, COUT), _unpooled(values, code, 2, ROWS, COUT), total


@triton.jit
def _unpooled(values, code, FIRST: tl.constexpr, ROWS: tl.constexpr, COUT: tl.constexpr):
    # The gradients of two pixels of a window, FIRST and the one right of it, side by side: [ROWS, 2 · out].
    zero = tl.zeros_like(values)
    left, right = tl.where(code == FIRST, values, zero), tl.where(code == FIRST + 1, values, zero)
    return tl.reshape(tl.join(left, right), [ROWS, 2 * COUT])


@triton.jit
def _conv_pool_kernel(
    x, w, bias, out, winner, n,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr,
    BIAS: tl.constexpr, PATCH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    block, client = tl.program_id(0), tl.program_id(1)
    PH: tl.constexpr = H // 2
    PW: tl.constexpr = W // 2
    DEPTH: tl.constexpr = 16 * CIN if PATCH else 4 * CIN
    windows = n * PH * PW
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < windows
    column, line, image = rows % PW, (rows // PW) % PH, rows // (PW * PH)
    k, both = tl.arange(0, DEPTH), tl.arange(0, 2 * COUT)
    x += client.to(tl.int64) * n * ((H + 2) * (W + 2) if PATCH else H * W) * CIN
    w += client.to(tl.int64) * (2 if PATCH else 3) * DEPTH * 2 * COUT
    upper = tl.zeros([ROWS, 2 * COUT], tl.float32)
    lower = tl.zeros([ROWS, 2 * COUT], tl.float32)
    weights = tl.load(w + k[:, None] * (2 * COUT) + both[None, :])
    if PATCH:
        values = _patches(x, column, line, image, inside, H, W, CIN)
        upper = tl.dot(values, weights, upper)
        lower = tl.dot(values, tl.load(w + (DEPTH + k[:, None]) * (2 * COUT) + both[None, :]), lower)
    else:
        j = (2 * column - 1)[:, None] + (k // CIN)[None, :]
        across = inside[:, None] & (j >= 0) & (j < W)
        place = x + ((image * H + 2 * line - 1) * W + 2 * column - 1)[:, None] * CIN + k[None, :]
        for p in tl.static_range(4):
            i = 2 * line + p - 1
            values = tl.load(place + p * W * CIN, mask=across & ((i >= 0) & (i < H))[:, None], other=0.0)
            # A patch's line p is line p of the 3x3 for the upper pixels of a window, and line p - 1 for the lower ones.
            if p > 0:
                lower = tl.dot(values, weights, lower)
            if p < 3:
                weights = tl.load(w + (p * DEPTH + k[:, None]) * (2 * COUT) + both[None, :])
                upper = tl.dot(values, weights, upper)
    y0, y1 = tl.split(tl.reshape(upper, [ROWS, COUT, 2]))
    y2, y3 = tl.split(tl.reshape(lower, [ROWS, COUT, 2]))
    co = tl.arange(0, COUT)
    if BIAS:
        shift = tl.load(bias + client * COUT + co)[None, :]
        y0, y1, y2, y3 = y0 + shift, y1 + shift, y2 + shift, y3 + shift
    # Rounded before they are compared, so that ties are those of the result that torch would pool.
    kind = out.dtype.element_ty
    y0, y1, y2, y3 = (
        y0.to(kind).to(tl.float32), y1.to(kind).to(tl.float32),
        y2.to(kind).to(tl.float32), y3.to(kind).to(tl.float32),
    )  # fmt: skip
    # The first of the largest, and what is no number before all numbers, as torch has it.
    best, which = y0, tl.zeros([ROWS, COUT], tl.int32)
    take = (y1 > best) | (y1 != y1)
    best, which = tl.where(take, y1, best), tl.where(take, 1, which)
    take = (y2 > best) | (y2 != y2)
    best, which = tl.where(take, y2, best), tl.where(take, 2, which)
    take = (y3 > best) | (y3 != y3)
    best, which = tl.where(take, y3, best), tl.where(take, 3, which)
    cut = best <= 0
    best, which = tl.where(cut, 0.0, best), tl.where(cut, CUT, which)
    at = client.to(tl.int64) * windows * COUT + rows[:, None] * COUT + co[None, :]
    tl.store(out + at, best.to(kind), mask=inside[:, None])
    tl.store(winner + at, which.to(tl.uint8), mask=inside[:, None])


@triton.jit
def _input_gradient_kernel(
    grad, winner, w, dx, n,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # 2x2 pixels of the input read a patch of 4x4 of the unpooled gradient, which the pooled one of 3x3 windows holds.
    block, client = tl.program_id(0), tl.program_id(1)
    PH: tl.constexpr = H // 2
    PW: tl.constexpr = W // 2
    BH: tl.constexpr = (H + 1) // 2
    BW: tl.constexpr = (W + 1) // 2
    DEPTH: tl.constexpr = 4 * COUT
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < n * BH * BW
    column, line, image = rows % BW, (rows // BW) % BH, rows // (BW * BH)
    k, both = tl.arange(0, DEPTH), tl.arange(0, 2 * CIN)
    grad += client.to(tl.int64) * n * PH * PW * COUT
    winner += client.to(tl.int64) * n * PH * PW * COUT
    dx += client.to(tl.int64) * n * H * W * CIN
    w += client.to(tl.int64) * 3 * DEPTH * 2 * CIN
    # Pixel p of a patch lies in window (p + 1) // 2 - 1 from this one, and is its second if p is even.
    pixel = k // COUT
    j = column[:, None] + ((pixel + 1) // 2 - 1)[None, :]
    across = inside[:, None] & (j >= 0) & (j < PW)
    away = (j * COUT) + (k % COUT)[None, :]
    right = (1 - pixel % 2)[None, :]
    upper = tl.zeros([ROWS, 2 * CIN], tl.float32)
    lower = tl.zeros([ROWS, 2 * CIN], tl.float32)
    weights = tl.load(w + k[:, None] * (2 * CIN) + both[None, :])
    for p in tl.static_range(4):
        i = line + (p + 1) // 2 - 1
        valid = across & ((i >= 0) & (i < PH))[:, None]
        place = ((image * PH + i) * PW)[:, None] * COUT + away
        values = tl.load(grad + place, mask=valid, other=0.0)
        code = tl.load(winner + place, mask=valid, other=CUT)
        values = tl.where(code == 2 * (1 - p % 2) + right, values, 0.0).to(grad.dtype.element_ty)
        # A patch's line p is line p of the 3x3 for the upper pixels of a window, and line p - 1 for the lower ones.
        if p > 0:
            lower = tl.dot(values, weights, lower)
        if p < 3:
            weights = tl.load(w + (p * DEPTH + k[:, None]) * (2 * CIN) + both[None, :])
            upper = tl.dot(values, weights, upper)
    spot = dx + ((image * H + 2 * line) * W + 2 * column)[:, None] * CIN + both[None, :]
    held = inside[:, None] & ((2 * column)[:, None] + (both // CIN)[None, :] < W)
    tl.store(spot, upper.to(dx.dtype.element_ty), mask=held)
    tl.store(spot + W * CIN, lower.to(dx.dtype.element_ty), mask=held & (2 * line + 1 < H)[:, None])


@triton.jit
def _weight_gradient_kernel(
    x, grad, winner, partial, sums, n, clients, per_split,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # For each line of the 3x3: patch lines (pixel, in) times both columns of the windows (out, column).
    split, client = tl.program_id(0), tl.program_id(1)
    PH: tl.constexpr = H // 2
    PW: tl.constexpr = W // 2
    DEPTH: tl.constexpr = 4 * CIN
    windows = n * PH * PW
    k, both = tl.arange(0, DEPTH), tl.arange(0, 2 * COUT)
    x += client.to(tl.int64) * n * H * W * CIN
    grad += client.to(tl.int64) * windows * COUT
    winner += client.to(tl.int64) * windows * COUT
    first = tl.zeros([DEPTH, 2 * COUT], tl.float32)
    second = tl.zeros([DEPTH, 2 * COUT], tl.float32)
    third = tl.zeros([DEPTH, 2 * COUT], tl.float32)
    total = tl.zeros([ROWS, COUT], tl.float32)
    for start in range(split * per_split, (split + 1) * per_split, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = rows < windows
        column, line, image = rows % PW, (rows // PW) % PH, rows // (PW * PH)
        upper, lower, both_rows = _unpooled_windows(grad, winner, rows, inside, ROWS, COUT)
        total += both_rows
        j = (2 * column - 1)[:, None] + (k // CIN)[None, :]
        across = inside[:, None] & (j >= 0) & (j < W)
        place = x + ((image * H + 2 * line - 1) * W + 2 * column - 1)[:, None] * CIN + k[None, :]
        i = 2 * line - 1
        patch = tl.trans(tl.load(place, mask=across & (i >= 0)[:, None], other=0.0))
        first = tl.dot(patch, upper, first)
        # The windows' own lines are always there: pooled nowhere means no window.
        patch = tl.trans(tl.load(place + W * CIN, mask=across, other=0.0))
        second = tl.dot(patch, upper, second)
        first = tl.dot(patch, lower, first)
        patch = tl.trans(tl.load(place + 2 * W * CIN, mask=across, other=0.0))
        third = tl.dot(patch, upper, third)
        second = tl.dot(patch, lower, second)
        patch = tl.trans(tl.load(place + 3 * W * CIN, mask=across & (i + 3 < H)[:, None], other=0.0))
        third = tl.dot(patch, lower, third)
    own = split.to(tl.int64) * clients + client
    spot = partial + own * 3 * DEPTH * 2 * COUT + k[:, None] * (2 * COUT) + both[None, :]
    tl.store(spot, first)
    tl.store(spot + DEPTH * 2 * COUT, second)
    tl.store(spot + 2 * DEPTH * 2 * COUT, third)
    tl.store(sums + own * COUT + tl.arange(0, COUT), tl.sum(total, 0))


@triton.jit
def _patch_weight_gradient_kernel(
    x, grad, winner, partial, sums, n, clients, per_split,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # Whole patches (line, pixel, in) times both columns of the windows (out, column): upper pixels, then lower ones.
    split, client = tl.program_id(0), tl.program_id(1)
    PH: tl.constexpr = H // 2
    PW: tl.constexpr = W // 2
    DEPTH: tl.constexpr = 16 * CIN
    windows = n * PH * PW
    k, both = tl.arange(0, DEPTH), tl.arange(0, 2 * COUT)
    x += client.to(tl.int64) * n * (H + 2) * (W + 2) * CIN
    grad += client.to(tl.int64) * windows * COUT
    winner += client.to(tl.int64) * windows * COUT
    first = tl.zeros([DEPTH, 2 * COUT], tl.float32)
    second = tl.zeros([DEPTH, 2 * COUT], tl.float32)
    total = tl.zeros([ROWS, COUT], tl.float32)
    for start in range(split * per_split, (split + 1) * per_split, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = rows < windows
        column, line, image = rows % PW, (rows // PW) % PH, rows // (PW * PH)
        upper, lower, both_rows = _unpooled_windows(grad, winner, rows, inside, ROWS, COUT)
        total += both_rows
        patch = tl.trans(_patches(x, column, line, image, inside, H, W, CIN))
        first = tl.dot(patch, upper, first)
        second = tl.dot(patch, lower, second)
    own = split.to(tl.int64) * clients + client
    spot = partial + own * 2 * DEPTH * 2 * COUT + k[:, None] * (2 * COUT) + both[None, :]
    tl.store(spot, first)
    tl.store(spot + DEPTH * 2 * COUT, second)
    tl.store(sums + own * COUT + tl.arange(0, COUT), tl.sum(total, 0))


@triton.jit
def _weight_gradient_total_kernel(
    partial, out, splits, inner, clients,
    CIN: tl.constexpr, COUT: tl.constexpr, PATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The sum over splits and the pixels of a window, in the weight's own order [clients, out, inner, 3, 3].
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < 9 * inner * COUT
    co, ci, tap = at % COUT, (at // COUT) % inner, at // (COUT * inner)
    kh, kw = tap // 3, tap % 3
    SIZE: tl.constexpr = (2 * 16 if PATCH else 3 * 4) * CIN * 2 * COUT
    # By whole patches, the lower pixels of a window have sums of their own, and meet this weight a line further on.
    LOWER: tl.constexpr = (16 + 4) * CIN * 2 * COUT
    place = partial + ((kh * 4 + kw) * CIN + ci) * (2 * COUT) + 2 * co
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        spot = place + (split * clients + client) * SIZE
        total += tl.load(spot, mask=inside, other=0.0)
        # The second column of a window meets this weight a pixel further on.
        total += tl.load(spot + CIN * 2 * COUT + 1, mask=inside, other=0.0)
        if PATCH:
            total += tl.load(spot + LOWER, mask=inside, other=0.0)
            total += tl.load(spot + LOWER + CIN * 2 * COUT + 1, mask=inside, other=0.0)
    tl.store(out + ((client * COUT + co) * inner + ci) * 9 + tap, total, mask=inside)


def packed(x: Tensor, cin: int, dtype: torch.dtype) -> Tensor:
    """`[total, h, w, channels]` of any strides and type, contiguous in `dtype`, padded to `cin` channels with zeros;
    with a frame of zeros, a pixel wide, where whole patches are read."""
    total, h, wd, inner = x.shape
    frame = int(whole_patch(cin))
    if inner == cin and x.dtype == dtype and not frame:
        return x.contiguous()
    out = torch.empty((total, h + 2 * frame, wd + 2 * frame, cin), dtype=dtype, device=x.device)
    grid = (triton.cdiv(out.numel(), BLOCK),)
    _pack_kernel[grid](x, out, out.numel(), *x.stride(), inner, H=h, W=wd, CIN=cin, FRAME=frame, BLOCK=BLOCK)
    return out


def _fitting(tile: Tile, cout: int) -> Tile:
    """A tile of the search, which had 32 channels out; with more of them, fewer rows fit the registers."""
    return tile if cout <= 32 else replace(tile, rows=tile.rows // 2)


def unframed(x: Tensor) -> tuple[int, int, int, int]:
    """The shape of what `packed` gave, without the frame."""
    total, h, wd, cin = x.shape
    frame = 2 * whole_patch(cin)
    return total, h - frame, wd - frame, cin


def weights_for(weight: Tensor, cin: int, dtype: torch.dtype, turned: bool = False) -> Tensor:
    """float32 `[clients, out, in, 3, 3]` as `conv_pool` reads it, or `turned`, as `input_gradient` does."""
    clients, cout, inner, _, _ = weight.shape
    if whole_patch(cin) and not turned:
        w = torch.empty((clients, 64 * cin * cout), dtype=dtype, device=weight.device)
        grid = (triton.cdiv(64 * cin * cout, BLOCK), clients)
        _patch_weights_kernel[grid](weight.contiguous(), w, inner, CIN=cin, COUT=cout, BLOCK=BLOCK)
        return w
    w = torch.empty((clients, 24 * cin * cout), dtype=dtype, device=weight.device)
    grid = (triton.cdiv(24 * cin * cout, BLOCK), clients)
    _weights_kernel[grid](weight.contiguous(), w, inner, CIN=cin, COUT=cout, TURNED=turned, BLOCK=BLOCK)
    return w


def conv_pool(
    x: Tensor, w: Tensor, bias: Tensor | None, cout: int, clients: int, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """`max_pool2d(relu(conv2d(x, w, bias, padding=1)), 2)`, and which pixel of each window won (0 to 3, or `CUT`)."""
    total, h, wd, cin = unframed(x)
    patch = whole_patch(cin)
    tile = tile or _fitting(PATCH_CONV_TILE if patch else CONV_TILE, cout)
    out = torch.empty((total, h // 2, wd // 2, cout), dtype=x.dtype, device=x.device)
    winner = torch.empty(out.shape, dtype=torch.uint8, device=x.device)
    n = total // clients
    _conv_pool_kernel[triton.cdiv(n * (h // 2) * (wd // 2), tile.rows), clients](
        x, w, w if bias is None else bias.contiguous(), out, winner, n,
        H=h, W=wd, CIN=cin, COUT=cout, BIAS=bias is not None, PATCH=patch, ROWS=tile.rows,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, winner


def input_gradient(
    grad: Tensor,
    winner: Tensor,
    turned: Tensor,
    cin: int,
    clients: int,
    h: int,
    wd: int,
    tile: Tile | None = None,
) -> Tensor:
    """The gradient with respect to the input of `conv_pool`, which was h x wd pixels of `cin` channels."""
    total, cout = grad.shape[0], grad.shape[-1]
    tile, n = tile or INPUT_TILE, total // clients
    dx = torch.empty((total, h, wd, cin), dtype=grad.dtype, device=grad.device)
    _input_gradient_kernel[triton.cdiv(n * ((h + 1) // 2) * ((wd + 1) // 2), tile.rows), clients](
        grad, winner, turned, dx, n, H=h, W=wd, CIN=cin, COUT=cout, ROWS=tile.rows,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dx


def weight_gradient(
    x: Tensor,
    grad: Tensor,
    winner: Tensor,
    inner: int,
    clients: int,
    tile: Tile | None = None,
    programs: int = PROGRAMS,
) -> tuple[Tensor, Tensor]:
    """The gradients with respect to weight and bias of `conv_pool`, in float32.

    They are `[clients, out, in, 3, 3]` and `[clients, out]`.
    """
    total, h, wd, cin = unframed(x)
    cout, n, patch = grad.shape[-1], total // clients, whole_patch(cin)
    tile = tile or _fitting(PATCH_WEIGHT_TILE if patch else WEIGHT_TILE, cout)
    windows = n * (h // 2) * (wd // 2)
    splits = max(1, min(windows // (4 * tile.rows), programs // clients))
    per_split = triton.cdiv(triton.cdiv(windows, splits), tile.rows) * tile.rows
    partial = torch.empty((splits, clients, (64 if patch else 24) * cin * cout), device=x.device)
    sums = torch.empty((splits, clients, cout), device=x.device)
    kernel = _patch_weight_gradient_kernel if patch else _weight_gradient_kernel
    kernel[splits, clients](
        x, grad, winner, partial, sums, n, clients, per_split, H=h, W=wd, CIN=cin, COUT=cout, ROWS=tile.rows,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    out = torch.empty((clients, cout, inner, 3, 3), device=x.device)
    _weight_gradient_total_kernel[triton.cdiv(9 * inner * cout, 256), clients](
        partial, out, splits, inner, clients, CIN=cin, COUT=cout, PATCH=patch, BLOCK=256
    )
    return out, sums.sum(0)
