"""The convolution kernels once more, a row of the 3x3 window at a time.

With channels last, three neighbours in a line lie together in memory: a row of the window is one contiguous
piece for each pixel. So there are three products with a long inner side instead of nine with a short one; the
piece is rounded up to four neighbours, because tiles are powers of 2, and the fourth is masked.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def conv_by_row_kernel(
    x, w, y, partial, pixels, blocks,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    CIN: tl.constexpr, COUT: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    STATS: tl.constexpr,
):  # fmt: skip
    """See `kernels.conv`."""
    block, client = tl.program_id(0), tl.program_id(1)
    k, co = tl.arange(0, 4 * CIN), tl.arange(0, COUT)
    x += client.to(tl.int64) * (pixels // (OH * OW)) * (H * W * CIN)
    y += client.to(tl.int64) * pixels * COUT
    w += client.to(tl.int64) * (9 * CIN * COUT)
    # [9, in, out] is [3, 3 · in, out]; the fourth neighbour has the weight 0.
    real = (k < 3 * CIN)[:, None]
    weights = w + k[:, None] * COUT + co[None, :]
    top = tl.load(weights, mask=real, other=0.0)
    middle = tl.load(weights + 3 * CIN * COUT, mask=real, other=0.0)
    bottom = tl.load(weights + 6 * CIN * COUT, mask=real, other=0.0)
    one = tl.zeros([COUT], tl.float32)
    two = tl.zeros([COUT], tl.float32)
    for tile in range(TILES):
        rows = (block * TILES + tile) * ROWS + tl.arange(0, ROWS)
        inside = rows < pixels
        column, line, image = rows % OW, (rows // OW) % OH, rows // (OW * OH)
        i, j = line * STRIDE - 1, column * STRIDE - 1
        across = j[:, None] + (k // CIN)[None, :]
        valid = inside[:, None] & (across >= 0) & (across < W) & (k < 3 * CIN)[None, :]
        place = x + ((image * H + i) * W + j)[:, None] * CIN + k[None, :]
        total = tl.zeros([ROWS, COUT], tl.float32)
        values = tl.load(place, mask=valid & (i >= 0)[:, None], other=0.0)
        total = tl.dot(values, top, total)
        values = tl.load(place + W * CIN, mask=valid, other=0.0)
        total = tl.dot(values, middle, total)
        values = tl.load(place + 2 * W * CIN, mask=valid & (i + 2 < H)[:, None], other=0.0)
        total = tl.dot(values, bottom, total)
        tl.store(y + rows[:, None] * COUT + co[None, :], total.to(y.dtype.element_ty), mask=inside[:, None])
        if STATS:
            one += tl.sum(total, 0)
            two += tl.sum(total * total, 0)
    if STATS:
        spot = partial + ((client * blocks + block) * 2) * COUT + co
        tl.store(spot, one)
        tl.store(spot + COUT, two)


@triton.jit
def conv_weight_by_row_kernel(
    x, dy, partial, pixels, clients, per_split,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    CIN: tl.constexpr, COUT: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """See `kernels.conv_weight_gradient`."""
    # WHOLE: one program sums all three rows of the window; else the third axis of the grid says which one.
    split, client = tl.program_id(0), tl.program_id(1)
    k, co = tl.arange(0, 4 * CIN), tl.arange(0, COUT)
    x += client.to(tl.int64) * (pixels // (OH * OW)) * (H * W * CIN)
    dy += client.to(tl.int64) * pixels * COUT
    first = 0 if WHOLE else tl.program_id(2)
    top = tl.zeros([4 * CIN, COUT], tl.float32)
    if WHOLE:
        middle = tl.zeros([4 * CIN, COUT], tl.float32)
        bottom = tl.zeros([4 * CIN, COUT], tl.float32)
    for start in range(split * per_split, (split + 1) * per_split, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = rows < pixels
        column, line, image = rows % OW, (rows // OW) % OH, rows // (OW * OH)
        i, j = line * STRIDE - 1 + first, column * STRIDE - 1
        across = j[:, None] + (k // CIN)[None, :]
        valid = inside[:, None] & (across >= 0) & (across < W) & (k < 3 * CIN)[None, :]
        place = x + ((image * H + i) * W + j)[:, None] * CIN + k[None, :]
        d = tl.load(dy + rows[:, None] * COUT + co[None, :], mask=inside[:, None], other=0.0)
        values = tl.load(place, mask=valid & ((i >= 0) & (i < H))[:, None], other=0.0)
        top = tl.dot(tl.trans(values), d, top)
        if WHOLE:
            values = tl.load(place + W * CIN, mask=valid, other=0.0)
            middle = tl.dot(tl.trans(values), d, middle)
            values = tl.load(place + 2 * W * CIN, mask=valid & (i + 2 < H)[:, None], other=0.0)
            bottom = tl.dot(tl.trans(values), d, bottom)
    base = partial + ((split * clients + client) * 9 + first * 3).to(tl.int64) * (CIN * COUT)
    spot, real = base + k[:, None] * COUT + co[None, :], (k < 3 * CIN)[:, None]
    tl.store(spot, top, mask=real)
    if WHOLE:
        tl.store(spot + 3 * CIN * COUT, middle, mask=real)
        tl.store(spot + 6 * CIN * COUT, bottom, mask=real)
