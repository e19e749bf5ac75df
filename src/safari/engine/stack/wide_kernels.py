"""Triton kernels for convolutions with many channels, 3x3 or 1x1, many clients at once.

The kernels of `kernels.py` hold all channels of a layer in one program. Here a program computes a tile of the
output's channels, and a pipelined loop sums over blocks of the input's. Activations are `[clients · n, h, w,
channels]`, weights `[clients, taps, out, in]`, both bfloat16; sums are float32. One order of the weights serves both
passes: the matrix units read it as it is or transposed.

Sizes are arguments, not constants, wherever they stay out of the inner loop: a net has few kernels to compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """Tile that a program computes: rows x columns, summing over `depth` numbers in a step of its loop.

    `rate` is how much a full device should get done with this tile, compared with the best one: an estimate.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    rate: float


# Rows are pixels, columns output channels. Estimated from registers, shared memory and bytes per operation of an H200,
# not measured yet (benchmarks/kernels.py --resnet18 --parts tiles).
CONV_TILES = (
    Tile(128, 256, 64, 8, 3, 1.0),
    Tile(256, 128, 64, 8, 3, 1.0),
    Tile(128, 128, 64, 8, 3, 0.9),
    Tile(64, 128, 64, 4, 4, 0.75),
    Tile(256, 64, 64, 8, 3, 0.75),
    Tile(128, 64, 64, 4, 4, 0.7),
    Tile(64, 64, 64, 4, 4, 0.5),
    Tile(128, 32, 64, 4, 4, 0.4),
    Tile(128, 16, 64, 4, 4, 0.2),
)
# Rows are output channels, columns input channels; the loop is over pixels.
WEIGHT_TILES = (
    Tile(128, 256, 64, 8, 3, 1.0),
    Tile(128, 128, 64, 8, 3, 0.9),
    Tile(128, 64, 64, 4, 4, 0.7),
    Tile(64, 128, 64, 4, 4, 0.7),
    Tile(64, 64, 64, 4, 4, 0.5),
    Tile(64, 32, 64, 4, 4, 0.3),
    Tile(64, 16, 64, 4, 4, 0.2),
    Tile(32, 64, 64, 4, 4, 0.3),
    Tile(16, 64, 64, 4, 4, 0.2),
)
BLOCK = 1024
# An H200's multiprocessors.
PROCESSORS = 132
MOST_SPLITS = 16
# Tiles narrower than this are for layers that are narrower themselves.
LEAST = 64
# Writing and reading a tile's sums takes about as long as this many steps of the loop that makes them.
STORE_STEPS = 6


@triton.jit(do_not_specialize=["n", "h", "wd", "oh", "ow", "stride", "blocks"])
def _conv_kernel(
    x, w, y, partial, n, h, wd, oh, ow, stride, blocks, cin, cout,
    SIDE: tl.constexpr, TURNED: tl.constexpr, STATS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    # TURNED: the input gradient of stride 1. It is a convolution with the taps from last to first; `cin` are then
    # the layer's output channels and `cout` its input channels.
    TAPS: tl.constexpr = SIDE * SIDE
    tiles = cout // COLUMNS
    # Neighbours read the same pixels.
    block, tile, client = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    pixels = n * oh * ow
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < pixels
    column, line, image = rows % ow, (rows // ow) % oh, rows // (ow * oh)
    top, left = line * stride - SIDE // 2, column * stride - SIDE // 2
    # Bit t says whether tap t of this pixel lies in the picture.
    bits = tl.zeros([ROWS], tl.int32)
    for t in tl.static_range(TAPS):
        i, j = top + t // SIDE, left + t % SIDE
        bits |= (inside & (i >= 0) & (i < h) & (j >= 0) & (j < wd)).to(tl.int32) << t
    k, co = tl.arange(0, DEPTH), tile * COLUMNS + tl.arange(0, COLUMNS)
    x += client.to(tl.int64) * n * h * wd * cin
    y += client.to(tl.int64) * pixels * cout
    w += client.to(tl.int64) * TAPS * cin * cout
    place = x + ((image * h + top) * wd + left)[:, None] * cin + k[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(TAPS * (cin // DEPTH)):
        tap, first = step % TAPS, (step // TAPS) * DEPTH
        away = ((tap // SIDE) * wd + tap % SIDE) * cin + first
        values = tl.load(place + away, mask=(((bits >> tap) & 1) != 0)[:, None], other=0.0)
        if TURNED:
            weights = tl.load(w + ((TAPS - 1 - tap) * cin + first + k[:, None]) * cout + co[None, :])
        else:
            weights = tl.trans(tl.load(w + (tap * cout + co[:, None]) * cin + first + k[None, :]))
        total = tl.dot(values, weights, total)
    tl.store(y + rows[:, None] * cout + co[None, :], total.to(y.dtype.element_ty), mask=inside[:, None])
    if STATS:
        place_of_sums = partial + ((client * blocks + block) * 2) * cout + co
        tl.store(place_of_sums, tl.sum(total, 0))
        tl.store(place_of_sums + cout, tl.sum(total * total, 0))


@triton.jit(do_not_specialize=["n", "h", "wd", "oh", "ow"])
def _conv_input_kernel(
    dy, w, dx, n, h, wd, oh, ow, cin, cout, SIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    # For stride 2. Pixels of the same parity (down, right) have the same taps: of 3x3, an even line has the middle
    # tap alone and an odd one the other two; of 1x1, odd lines have none.
    TAPS: tl.constexpr = SIDE * SIDE
    tiles = cin // COLUMNS
    block, tile, client = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    # Those with most to do begin.
    down, right = (3 - tl.program_id(2)) // 2, (3 - tl.program_id(2)) % 2
    half_h, half_w = (h + 1) // 2, (wd + 1) // 2
    rows = block * ROWS + tl.arange(0, ROWS)
    column, line, image = rows % half_w, (rows // half_w) % half_h, rows // (half_w * half_h)
    inside = (rows < n * half_h * half_w) & (2 * line + down < h) & (2 * column + right < wd)
    if SIDE == 3:
        count, bottom, last = (1 + down) * (1 + right), line + down, column + right
    else:
        count, bottom, last = (1 - down) * (1 - right), line, column
    # Bit 2a + b: is there a result a lines above `bottom`, b columns left of `last`?
    bits = tl.zeros([ROWS], tl.int32)
    for t in tl.static_range(4):
        i, j = bottom - t // 2, last - t % 2
        bits |= (inside & (i >= 0) & (i < oh) & (j >= 0) & (j < ow)).to(tl.int32) << t
    k, ci = tl.arange(0, DEPTH), tile * COLUMNS + tl.arange(0, COLUMNS)
    dy += client.to(tl.int64) * n * oh * ow * cout
    dx += client.to(tl.int64) * n * h * wd * cin
    w += client.to(tl.int64) * TAPS * cin * cout
    place = dy + ((image * oh + bottom) * ow + last)[:, None] * cout + k[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    # `count` is 1, 2 or 4: shifts do for division.
    for step in range(count * (cout // DEPTH)):
        at, first = step & (count - 1), (step >> (down + right)) * DEPTH
        a, b = at >> right, at & right
        if SIDE == 3:
            tap = (1 - down + 2 * a) * 3 + 1 - right + 2 * b
        else:
            tap = 0
        away = first - (a * ow + b) * cout
        values = tl.load(place + away, mask=(((bits >> (2 * a + b)) & 1) != 0)[:, None], other=0.0)
        weights = tl.load(w + (tap * cout + first + k[:, None]) * cin + ci[None, :])
        total = tl.dot(values, weights, total)
    spot = (image * h + 2 * line + down) * wd + 2 * column + right
    tl.store(dx + spot[:, None] * cin + ci[None, :], total.to(dx.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["n", "h", "wd", "stride", "clients"])
def _conv_weight_kernel(
    x, dy, partial, n, h, wd, stride, clients, per_split, cin, cout,
    OH: tl.constexpr, OW: tl.constexpr, SIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    # Pixels are found in the inner loop, so that the compiler knows the picture's size.
    split, client = tl.program_id(1), tl.program_id(2)
    across = cin // COLUMNS
    tap, tile = tl.program_id(0) % (SIDE * SIDE), tl.program_id(0) // (SIDE * SIDE)
    co = (tile // across) * ROWS + tl.arange(0, ROWS)
    ci = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    down, right = tap // SIDE - SIDE // 2, tap % SIDE - SIDE // 2
    pixels = n * OH * OW
    x += client.to(tl.int64) * n * h * wd * cin
    dy += client.to(tl.int64) * pixels * cout
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(split * per_split, (split + 1) * per_split, DEPTH):
        rows = start + tl.arange(0, DEPTH)
        inside = rows < pixels
        column, line, image = rows % OW, (rows // OW) % OH, rows // (OW * OH)
        i, j = line * stride + down, column * stride + right
        valid = inside & (i >= 0) & (i < h) & (j >= 0) & (j < wd)
        d = tl.load(dy + rows[:, None] * cout + co[None, :], mask=inside[:, None], other=0.0)
        place = x + ((image * h + i) * wd + j)[:, None] * cin + ci[None, :]
        values = tl.load(place, mask=valid[:, None], other=0.0)
        total = tl.dot(tl.trans(d), values, total)
    spot = ((split.to(tl.int64) * clients + client) * (SIDE * SIDE) + tap) * cout * cin
    tl.store(partial + spot + co[:, None] * cin + ci[None, :], total)


@triton.jit(do_not_specialize=["inner"])
def _weights_kernel(weight, w, inner, cin, cout, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    # float32 [clients, out, inner, taps] -> [clients, taps, out, in], `inner` padded to `in` with zeros.
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < cin * cout
    co, ci = at // cin, at % cin
    source = weight + client * cout * inner * TAPS + (co * inner + ci) * TAPS
    for tap in tl.static_range(TAPS):
        value = tl.load(source + tap, mask=inside & (ci < inner), other=0.0)
        tl.store(w + (client * TAPS + tap) * cin * cout + at, value.to(w.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits", "inner", "clients"])
def _weight_gradient_total_kernel(
    partial, out, splits, inner, clients, cin, cout, TAPS: tl.constexpr, BLOCK: tl.constexpr
):
    # The splits' sum, [clients, taps, out, in], in the weight's own order [clients, out, inner, taps].
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < cout * inner * TAPS
    tap, ci, co = at % TAPS, (at // TAPS) % inner, at // (TAPS * inner)
    place = partial + (client * TAPS + tap) * cin * cout + co * cin + ci
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(place + split * clients.to(tl.int64) * TAPS * cin * cout, mask=inside, other=0.0)
    tl.store(out + client * cout * inner * TAPS + at, total, mask=inside)


def weights_for(weight: Tensor, cin: int, dtype: torch.dtype) -> Tensor:
    """float32 `[clients, out, in, side, side]` in the kernels' order, `in` padded to `cin` with zeros."""
    clients, cout, inner, side, _ = weight.shape
    w = torch.empty((clients, side * side, cout, cin), dtype=dtype, device=weight.device)
    grid = (triton.cdiv(cin * cout, BLOCK), clients)
    _weights_kernel[grid](weight, w, inner, cin, cout, TAPS=side * side, BLOCK=BLOCK)
    return w


def conv(
    x: Tensor, w: Tensor, stride: int, stats: bool, turned: bool = False, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Convolution with padding `side // 2`, and the partial sums that batch norm needs.

    `turned`: the input gradient of a convolution with stride 1, whose weights are `w` and whose output's is `x`.
    """
    (clients, taps, cout, _), (total, h, wd, cin) = w.shape, x.shape
    if turned:
        cout = w.shape[3]
    n, oh, ow = total // clients, (h - 1) // stride + 1, (wd - 1) // stride + 1
    tile = tile or conv_tile(n * oh * ow, clients, cin, cout)
    blocks = triton.cdiv(n * oh * ow, tile.rows)
    y = torch.empty((total, oh, ow, cout), dtype=x.dtype, device=x.device)
    partial = torch.empty((clients, blocks, 2, cout) if stats else (0,), device=x.device)
    _conv_kernel[blocks * (cout // tile.columns), clients](
        x, w, y, partial, n, h, wd, oh, ow, stride, blocks, cin, cout,
        SIDE=_side(taps), TURNED=turned, STATS=stats,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=min(tile.depth, cin),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y, partial


def conv_input_gradient(
    dy: Tensor, w: Tensor, stride: int, h: int, wd: int, tile: Tile | None = None
) -> Tensor:
    """The gradient with respect to the input of `conv`, which was h x wd pixels."""
    if stride == 1:
        return conv(dy, w, 1, stats=False, turned=True, tile=tile)[0]
    (clients, taps, cout, cin), (total, oh, ow, _) = w.shape, dy.shape
    n = total // clients
    pixels = n * ((h + 1) // 2) * ((wd + 1) // 2)
    tile = tile or conv_tile(pixels, 4 * clients, cout, cin)
    dx = torch.empty((total, h, wd, cin), dtype=dy.dtype, device=dy.device)
    _conv_input_kernel[triton.cdiv(pixels, tile.rows) * (cin // tile.columns), clients, 4](
        dy, w, dx, n, h, wd, oh, ow, cin, cout, SIDE=_side(taps),
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=min(tile.depth, cout),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dx


def conv_weight_gradient(
    x: Tensor, dy: Tensor, inner: int, clients: int, stride: int, side: int, tile: Tile | None = None
) -> Tensor:
    """The gradient with respect to the weights of `conv`, float32 `[clients, out, inner, side, side]`."""
    total, h, wd, cin = x.shape
    _, oh, ow, cout = dy.shape
    taps, pixels = side * side, total // clients * oh * ow
    tile, splits = weight_tile(pixels, taps * clients, cin, cout, tile)
    per_split = triton.cdiv(triton.cdiv(pixels, splits), tile.depth) * tile.depth
    partial = torch.empty((splits, clients, taps, cout, cin), device=x.device)
    tiles = taps * (cout // tile.rows) * (cin // tile.columns)
    _conv_weight_kernel[tiles, splits, clients](
        x, dy, partial, total // clients, h, wd, stride, clients, per_split, cin, cout,
        OH=oh, OW=ow, SIDE=side, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits == taps == 1 and inner == cin:
        return partial.view(clients, cout, cin, 1, 1)
    out = torch.empty((clients, cout, inner, side, side), device=x.device)
    _weight_gradient_total_kernel[triton.cdiv(cout * inner * taps, BLOCK), clients](
        partial, out, splits, inner, clients, cin, cout, TAPS=taps, BLOCK=BLOCK
    )
    return out


def conv_tile(pixels: int, clients: int, cin: int, cout: int) -> Tile:
    """The tile with which a convolution of this many pixels for each client should take least time."""
    return conv_tiles(pixels, clients, cin, cout)[0]


def conv_tiles(pixels: int, clients: int, cin: int, cout: int) -> list[Tile]:
    """All tiles that fit, the best first.

    A multiprocessor works off programs one after the other, and all wait for the one with most of them.
    """

    def time(tile: Tile) -> float:
        programs = triton.cdiv(pixels, tile.rows) * (cout // tile.columns) * clients
        return float(triton.cdiv(programs, PROCESSORS) * tile.rows * tile.columns / tile.rate)

    return sorted((t for t in CONV_TILES if min(cout, LEAST) <= t.columns <= cout), key=time)


def weight_tile(pixels: int, batches: int, cin: int, cout: int, tile: Tile | None = None) -> tuple[Tile, int]:
    """The fastest tile (or `tile`) for the weights' gradient, and the number of parts of the pixels."""
    return weight_tiles(pixels, batches, cin, cout, [tile] if tile else None)[0]


def weight_tiles(
    pixels: int, batches: int, cin: int, cout: int, tiles: Sequence[Tile] | None = None
) -> list[tuple[Tile, int]]:
    """All tiles that fit, or those given, each with its best number of parts; the best first.

    More parts fill the device, but each is a sum that is written and read once more. `batches` are clients times taps.
    """

    def time(choice: tuple[Tile, int]) -> float:
        tile, splits = choice
        programs = (cout // tile.rows) * (cin // tile.columns) * batches * splits
        steps = triton.cdiv(pixels, splits * tile.depth) + STORE_STEPS
        return float(triton.cdiv(programs, PROCESSORS) * steps * tile.rows * tile.columns / tile.rate)

    def splits_of(tile: Tile) -> range:
        return range(1, max(1, min(MOST_SPLITS, pixels // (4 * tile.depth))) + 1)

    if tiles is None:
        rows, columns = min(cout, LEAST), min(cin, LEAST)
        tiles = [t for t in WEIGHT_TILES if rows <= t.rows <= cout and columns <= t.columns <= cin]
    return sorted((min(((t, s) for s in splits_of(t)), key=time) for t in tiles), key=time)


def _side(taps: int) -> int:
    return 3 if taps == 9 else 1
