"""Which tiles are fastest for the convolution kernels, and what do they bring to a round? (CUDA only)

    python benchmarks/kernels.py --out results/engine/kernels.json

For each shape the best few; then the training part of a round with the tiles of `kernels.py`, and with the
best. What wins belongs into the tables there.

    python benchmarks/kernels.py --resnet18 --out results/engine/resnet18-kernels.json

A ResNet-18's training step, then each of its convolutions, against cuDNN (benchmarks/resnet18.py); in a minute.

    python benchmarks/kernels.py --fedawe --out results/engine/fedawe-kernels.json

A training step of 50 clients with FedAWE's small CNN, with the kernels for pooling and without (benchmarks/fedawe.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import fedawe
import resnet18
import torch

from engine import random_pictures, training_part
from safari.engine.stack import kernels as k

# In and out channels, the picture's side, the stride. Tables are by input channels: those of stride 1 decide.
SHAPES = [(16, 16, 32, 1), (32, 32, 16, 1), (64, 64, 8, 1)]
STRIDED = [(16, 32, 32, 2), (32, 64, 16, 2)]
BATCH = 64
TILES = [k.Tile(rows, warps, 3) for rows, warps in ((64, 2), (64, 4), (128, 4), (128, 8), (256, 4), (256, 8))]
# Bytes that pass through an H200's memory in a microsecond.
BYTES = 4.8e6

Row = tuple[float, k.Tile]


def microseconds(work: Callable[[], object], repeats: int = 30) -> float:
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


def search(clients: int, shape: tuple[int, int, int, int]) -> dict[str, list[Row]]:
    cin, cout, side, stride = shape
    out = (side - 1) // stride + 1
    x = torch.randn(clients * BATCH, side, side, cin, device="cuda").bfloat16()
    dy = torch.randn(clients * BATCH, out, out, cout, device="cuda").bfloat16()
    w, _ = k.weights_for(torch.randn(clients, cout, cin, 3, 3, device="cuda"), cin, torch.bfloat16)
    conv = lambda tile: k.conv(x, w, cout, clients, stride, True, tile)
    weight = lambda tile: k.conv_weight_gradient(x, dy, cin, clients, stride, tile)
    moved = 2 * (x.numel() + dy.numel()) / BYTES
    found: dict[str, list[Row]] = {}
    for name, work in (("conv", conv), ("weight", weight)):
        right = work(None)
        right = right[0] if isinstance(right, tuple) else right
        rows: list[Row] = []
        for tile in TILES:
            try:
                ours = work(tile)
                ours = ours[0] if isinstance(ours, tuple) else ours
                error = float((ours.float() - right.float()).norm() / right.float().norm())
                if error > 0.01:
                    print(f"  wrong by {error:.2g}: {tile}", flush=True)
                    continue
                rows.append((microseconds(lambda work=work, tile=tile: work(tile)), tile))
            except Exception as error:  # too much shared memory, say
                print(f"  failed: {tile}: {type(error).__name__} {str(error)[:100]}", flush=True)
        found[name] = sorted(rows, key=lambda row: row[0])
        now = microseconds(lambda work=work: work(None))
        print(f"{shape} {name}: {now:.1f} us now, {moved:.1f} us by bytes", flush=True)
        for us, tile in found[name][:4]:
            print(f"    {us:7.1f} us  {tile}", flush=True)
    return found


def rounds(name: str, clients: list[int], data: object) -> list[dict[str, object]]:
    lines = []
    for count in clients:
        row = training_part(count, data, "cuda", "bfloat16", 10, "auto")
        middle = row["seconds"]["median"] * 1e3
        print(f"{name}: {count} clients {middle:.2f} ms {row['note']}", flush=True)
        lines.append({"tiles": name, "clients": count, **row})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--strided", action="store_true", help="the shapes with stride 2, too")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resnet18", action="store_true", help="a ResNet-18 instead, step and layers")
    resnet18.add_arguments(parser.add_argument_group("with --resnet18"))
    fedawe.add_arguments(parser.add_argument_group("FedAWE's CNN (also with --seconds and --tiny)"))
    args = parser.parse_args()
    if args.fedawe:
        fedawe.benchmark(args)
        return
    if args.resnet18:
        resnet18.benchmark(args)
        return
    found = {shape: search(args.clients, shape) for shape in SHAPES + (STRIDED if args.strided else [])}
    data, counts = random_pictures(50_000, 1_000), [10, 100]
    result: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "search": [
            {"shape": shape, "kernel": name, "tiles": [{"us": us, **asdict(tile)} for us, tile in rows]}
            for shape, kinds in found.items()
            for name, rows in kinds.items()
        ],
        "rounds": rounds("tiles as they are", counts, data),
    }
    for kind, table in (("conv", k.CONV_TILES), ("weight", k.WEIGHT_TILES)):
        table.update({shape[0]: found[shape][kind][0][1] for shape in SHAPES if found[shape][kind]})
    print(f"CONV_TILES = {k.CONV_TILES}\nWEIGHT_TILES = {k.WEIGHT_TILES}", flush=True)
    result["rounds"] += rounds("best tiles", counts, data)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
