"""Which tiles are fastest for the convolution kernels? Prints the best few for each shape (CUDA only).

python benchmarks/kernels.py --clients 10
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import torch

from safari.engine.stack import kernels as k

SHAPES = [(16, 16, 32, 1), (16, 32, 32, 2), (32, 32, 16, 1), (32, 64, 16, 2), (64, 64, 8, 1)]
BATCH = 64


def microseconds(work, repeats: int = 30) -> float:
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            work()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 100)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10)
    clients = parser.parse_args().clients
    for cin, cout, side, stride in SHAPES:
        out = (side - 1) // stride + 1
        x = torch.randn(clients * BATCH, side, side, cin, device="cuda").bfloat16()
        dy = torch.randn(clients * BATCH, out, out, cout, device="cuda").bfloat16()
        w, _ = k.weights_for(torch.randn(clients, cout, cin, 3, 3, device="cuda"), cin, torch.bfloat16)
        found: dict[str, list] = {"conv": [], "weight": []}
        for rows, warps in itertools.product((64, 128, 256), (2, 4, 8)):
            tile = k.Tile(rows, warps, 3)
            conv = lambda tile=tile: k.conv(x, w, cout, clients, stride, True, tile)
            _try(found["conv"], conv, (rows, warps))
            if rows == 256:
                continue
            for programs in (1024, 4096):
                weight = lambda tile=tile, p=programs: k.conv_weight_gradient(
                    x, dy, cin, clients, stride, tile, p
                )
                _try(found["weight"], weight, (rows, warps, programs))
        moved = 2 * (x.numel() + dy.numel()) / 4.3e6
        for name, rows in found.items():
            best = "  ".join(f"{us:.1f} {how}" for us, how in sorted(rows)[:4])
            print(f"{(cin, cout, side, stride)} {name:6} bytes {moved:.1f} us | {best}", flush=True)


def _try(rows: list, work, how: tuple) -> None:
    try:
        rows.append((microseconds(work), how))
    except Exception as error:
        rows.append((1e6, (*how, type(error).__name__)))


if __name__ == "__main__":
    main()
